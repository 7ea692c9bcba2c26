"""`python -m headwater.services.decode`: the decode process."""

from headwater.rpc.process import main
from headwater.services.decode.service import run

main("decode", run)
