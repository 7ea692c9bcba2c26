"""`python -m headwater.services.router`: the router process."""

from headwater.rpc.process import main
from headwater.services.router.service import run

main("router", run)
