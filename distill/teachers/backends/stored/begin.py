"""Beginning of a store: one process of one run writes its plan and what lies beside the shards; the others check it.

A folder may have been begun by another run, with other data, losses and students, by `distill cache`, or by a run that
was killed: what is there is used. It must be of the same teacher, as it is computed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distill.core.diff_settings import diff_settings
from distill.core.files import make_folder
from distill.core.ranks import broadcast_from_rank0, is_main_process, world_size
from distill.teachers.backends.stored.contents import begin_lock
from distill.teachers.backends.stored.format import MANIFEST, PLAN, Plan, read_store_json, write_signed

BEGINS_WITHIN_S = 1800.0  # seconds; machines load a teacher at different speeds


class StoreFolder(NamedTuple):
    """A folder that a store is begun in.

    Attributes:
        place: The setting or option that names it, for messages.
        of_command: True where a command names it, which asks for its own tail and temperature; a run takes those of
            the folder.
    """

    path: Path
    place: str
    of_command: bool

    def begin(self, plan: Plan, write_beside: Callable[[Plan], None], room: Callable[[], list[str]]) -> Plan:
        """Begin a store, or go on with the one that is there; every process calls this, and gets the plan that holds.

        Args:
            write_beside: Function that writes what goes with the shards and is not there yet, of the plan that holds.
            room: Function that returns why the disk is too small.

        Raises:
            ValueError: the folder holds something else, or outputs of another teacher, with the first difference.
        """

        def begin() -> Plan:
            self.require_empty()
            make_folder(self.path)
            with begin_lock(self.path):  # several runs may begin one store at once, as a sweep over seeds does
                return self._begin_locked(plan, write_beside, room)

        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if together or world_size() == 1:
            return broadcast_from_rank0(begin)
        # processes without a connection agree through the folder: the first one writes the plan, the others wait for it
        return self.begin_apart(begin, plan)

    def _begin_locked(self, plan: Plan, write_beside: Callable[[Plan], None], room: Callable[[], list[str]]) -> Plan:
        begun = read_store_json(self.path / PLAN)
        if begun is not None:
            self.require_same(begun, plan)
        for problem in room():
            raise ValueError(problem)
        if begun is None:
            write_signed(self.path / PLAN, plan)
            begun = plan
        # also of a store that was begun: the run that began it may have been killed before it had written all of these
        if not (self.path / MANIFEST).is_file():
            write_beside(begun)
        return begun

    def begin_apart(self, begin: Callable[[], Plan], plan: Plan) -> Plan:
        """Begin the store, or wait for the first process to do so, in processes that are not connected."""
        if is_main_process():
            return begin()
        until = time.monotonic() + BEGINS_WITHIN_S
        while (begun := read_store_json(self.path / PLAN)) is None:
            if time.monotonic() > until:
                raise ValueError(
                    f"{self.place}: {self.path} was not begun by the first process; expected a folder "
                    "that all machines share"
                )
            time.sleep(0.2)
        self.require_same(begun, plan)
        return begun

    def require_empty(self) -> None:
        """Check that a folder without a plan is empty, but for locks and temporary files.

        The plan is the first other file that is written, so it is looked for after the others: another run may begin
        the store meanwhile.
        """
        others = self.path.exists() and any(not path.name.startswith(".") for path in self.path.iterdir())
        if others and read_store_json(self.path / PLAN) is None:
            raise ValueError(f"{self.place}: {self.path} is not empty and holds no cache; name another folder")

    def require_same(self, begun: Plan, now: Mapping[str, Any]) -> None:
        """Check that what is stored is what this run would store; ValueError with the first difference."""
        # names that only one of the plans has are not compared: `weights` is unknown for a sharded teacher
        of_top_k = ["k", *(["tail", "temperature"] if self.of_command else [])] if begun["kind"] == "top_k" else []
        same = ("kind", "dtype", "hidden", "scale", "softcap", "weights", *of_top_k)
        flat = [{**plan, "teacher.dtype": plan.get("teacher", {}).get("dtype")} for plan in (begun, now)]
        names = [name for name in (*same, "teacher.dtype") if all(plan.get(name) is not None for plan in flat)]
        first, second = ({name: plan[name] for name in names} for plan in flat)
        for name, old, new in diff_settings(first, second):
            raise ValueError(
                f"{self.place}: {self.path} was begun with other settings: {name} was {old!r}, now {new!r}; "
                "name another folder"
            )
