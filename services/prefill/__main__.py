"""`python -m headwater.services.prefill`: the prefill process."""

from headwater.rpc.process import main
from headwater.services.prefill.service import run

main("prefill", run)
