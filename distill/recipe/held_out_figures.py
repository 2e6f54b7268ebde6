"""Names of held-out figures that `train.keep_best` chooses by, and which direction of each is better.

A figure has the name of its column in `metrics.jsonl`, without the prefix `eval_`: `kl`, `agreement`, with routes
`kl_ROUTE`, of a named held-out set `SET_kl`, of a task
`TASK_accuracy`.
"""

from __future__ import annotations

from collections.abc import Collection

# name: whether higher is better
BASE_FIGURES = {
    "loss": False,
    "kl": False,
    "divergence": False,
    "cross_entropy": False,
    "perplexity": False,
    "agreement": True,
}
OF_DIVERGENCE = ("kl", "divergence", "agreement")  # these are also measured of each route
PREFIX = "eval_"  # of a figure's column in metrics.jsonl


def figure_directions(
    routes: list[str], sets: list[str], tasks: list[str], absent: Collection[str] = ()
) -> dict[str, bool]:
    """Return the names of the figures that a run may be judged by, each with whether higher is better.

    Args:
        routes: routes of the teachers; empty without routes.
        sets: names of the held-out sets beside the one that has none.
        tasks: names of the tasks that every evaluation answers.
        absent: names of `OF_DIVERGENCE` that an evaluation lacks by its loss.
    """
    directions = {name: higher for name, higher in BASE_FIGURES.items() if name not in absent}
    for route in routes:
        directions |= {f"{name}_{route}": BASE_FIGURES[name] for name in OF_DIVERGENCE if name not in absent}
    by_set = {f"{name}_{figure}": higher for name in sets for figure, higher in directions.items()}
    return directions | by_set | {f"{name}_accuracy": True for name in tasks}
