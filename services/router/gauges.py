"""What the router shows of itself while it runs: see headwater.telemetry.catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.telemetry.metrics import observe, start_at_zero

if TYPE_CHECKING:
    from headwater.services.router.core import RouterCore
    from headwater.telemetry.metrics import Reading


def observe_router(core: RouterCore) -> None:
    """Exports the line, the engines' health and the choice of paths."""

    def engines_up() -> Reading:
        return [(int(engine.is_serving), {"engine": engine.name}) for engine in core.engines]

    def prompts() -> Reading:
        # A copy, since the event loop counts meanwhile.
        return [(n, {"path": path.value}) for path, n in list(core.outlook.num_chosen.items())]

    start_at_zero(attainment.objective.name for attainment in core.objectives.all)
    observe(
        {
            "vllm:num_requests_running": lambda: core.admission.num_running,
            "vllm:num_requests_waiting": lambda: core.admission.num_waiting,
            # Counted anyway; a counter of its own would cost as much as all else per token.
            "vllm:generation_tokens": lambda: core.generated_tokens.total,
        },
        {"model_name": core.model.name},
    )
    observe(
        {
            "headwater.router.prompts": prompts,
            "headwater.router.engine_up": engines_up,
        }
    )
