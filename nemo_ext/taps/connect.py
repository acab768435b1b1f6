"""Set-up of a pipeline's links: who is where, which transport joins whom, and the handshakes.

All stages go through the same rounds over the pipeline group; a round in which any stage fails raises on all of them.
"""

import os
import platform
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_ext.taps import shm
from nemo_ext.taps.errors import TapError, TransportUnavailable
from nemo_ext.taps.monitor import Door, Monitor
from nemo_ext.taps.nixl import NixlInlet, NixlOutlet, load_nixl
from nemo_ext.taps.p2p import P2PInlet, P2POutlet
from nemo_ext.taps.plan import TapPlan
from nemo_ext.taps.transport import Inlet, Outlet

TRANSPORTS = ("auto", "local", "shm", "p2p", "nixl")


@dataclass(frozen=True)
class Place:
    """Where a stage runs and what it has.

    Attributes:
        host: equal for processes that can share memory and see each other in /proc.
        label: for errors.
        wanted: `policy.draft.tap_transport`.
        device: type of the tensors.
        ordered: stores are seen in order by other cores, which `shm` relies on.
        nixl: why NIXL cannot be used; empty if it can.
        shm_free: bytes.
    """

    host: str
    label: str
    wanted: str
    device: str
    ordered: bool
    nixl: str
    shm_free: int


def place(wanted: str, device: torch.device) -> Place:
    """This process's place."""
    nixl = ""
    if wanted in ("auto", "nixl"):
        try:
            load_nixl()
        except TransportUnavailable as error:
            nixl = str(error)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace, memory = os.stat("/proc/self/ns/pid"), os.stat(shm.FOLDER)
    return Place(
        host=f"{boot}/{namespace.st_ino}/{memory.st_dev}",
        label=f"process {os.getpid()} on {socket.gethostname()}",
        wanted=wanted,
        device=device.type,
        ordered=platform.machine() in ("x86_64", "AMD64"),
        nixl=nixl,
        shm_free=shm.free_bytes(),
    )


def choose(plan: TapPlan, places: list[Place]) -> dict[int, str]:
    """The transport of each source's link, the same on every stage.

    Raises:
        TransportUnavailable: if the one that is set cannot work.
    """
    last = places[-1]
    settings = sorted({one.wanted for one in places})
    if len(settings) > 1:
        raise TransportUnavailable(
            f"policy.draft.tap_transport is {' and '.join(settings)} on different stages; set one"
        )
    if last.wanted not in TRANSPORTS:
        raise TransportUnavailable(
            f"policy.draft.tap_transport is {last.wanted}; it must be one of {', '.join(TRANSPORTS)}"
        )
    budget = last.shm_free
    chosen = {}
    for stage in plan.remote_stages:
        reasons = _obstacles(places[stage], last)
        size = shm.segment_bytes(plan.of_stage(stage), plan)
        if last.wanted != "auto":
            if last.wanted in reasons:
                raise TransportUnavailable(f"stage {stage}: {reasons[last.wanted]}")
            chosen[stage] = last.wanted
        elif "shm" not in reasons and size <= budget:
            budget -= size
            chosen[stage] = "shm"
        else:
            chosen[stage] = "p2p" if "nixl" in reasons else "nixl"
    return chosen


def _obstacles(source: Place, last: Place) -> dict[str, str]:
    """Transports that cannot join the two, with the reason."""
    is_set = "policy.draft.tap_transport is"
    reasons = {"local": f"{is_set} local, but the pipeline has stages in other processes; set auto"}
    if source.host != last.host:
        reasons["shm"] = f"{is_set} shm, but the stage ({source.label}) shares no memory with {last.label}; set auto"
    elif source.device != "cpu":
        reasons["shm"] = f"{is_set} shm, but the taps are in {source.device} memory; set auto"
    elif not source.ordered:
        reasons["shm"] = f"{is_set} shm, which relies on the memory order of x86; set p2p"
    nixl = source.nixl or last.nixl
    if nixl:
        reasons["nixl"] = nixl
    return reasons


@dataclass
class Links:
    """A stage's ends: `outlet` on a source, `inlets` by source on the last stage. `kinds`: transport by source."""

    kinds: dict[int, str] = field(default_factory=dict)
    outlet: Outlet | None = None
    inlets: dict[int, Inlet] = field(default_factory=dict)
    monitor: Monitor | None = None
    listener: socket.socket | None = None

    def close(self) -> None:
        """Gives everything back; safe to call twice and after a failure."""
        for end in (self.listener, self.outlet, *self.inlets.values(), self.monitor):
            if end is not None:
                end.close()
        self.outlet, self.inlets = None, {}


def connect(plan: TapPlan, group: dist.ProcessGroup, wanted: str, device: torch.device, **monitor_settings) -> Links:
    """Joins the stages of a pipeline; collective over its group.

    Raises:
        TapError: on every stage, if any cannot do its part.
    """
    links = Links()
    if group.size() == 1:
        return links
    places = in_step(group, partial(place, wanted, device))
    links.kinds = in_step(group, partial(choose, plan, places))[group.rank()]
    names = [f"stage {stage} ({one.label})" for stage, one in enumerate(places)]
    links.monitor = Monitor(group.rank(), names, **monitor_settings)
    outside = len({one.host for one in places}) > 1
    try:
        offers, door = in_step(group, partial(_make_inlets, links, plan, group, device, outside))[-1]
        answers = in_step(group, partial(_make_outlet, links, plan, group, device, offers, door))
        in_step(group, partial(_complete, links, group, answers, door))
    except BaseException:
        links.close()
        raise
    return links


def _make_inlets(links: Links, plan: TapPlan, group: dist.ProcessGroup, device: torch.device, outside: bool):
    """The last stage's ends and listener; gives the ends' offers by stage, and the door."""
    if group.rank() != plan.pipeline.last:
        return None
    links.listener, door = Monitor.listen(outside, secrets.token_hex(16))
    for stage, kind in links.kinds.items():
        streams = plan.of_stage(stage)
        if kind == "shm":
            links.inlets[stage] = shm.ShmInlet(streams, plan)
        elif kind == "p2p":
            links.inlets[stage] = P2PInlet(streams, plan, device, door.host)
        else:
            links.inlets[stage] = NixlInlet(streams, plan, device)
    return {stage: inlet.offer for stage, inlet in links.inlets.items()}, door


def _make_outlet(links: Links, plan: TapPlan, group: dist.ProcessGroup, device: torch.device, offers, door: Door):
    """A source's end; gives its answer."""
    stage = group.rank()
    if stage == plan.pipeline.last:
        return None
    links.monitor.join(door)
    kind, streams = links.kinds.get(stage), plan.of_stage(stage)
    if kind is None:
        return None
    if kind == "shm":
        links.outlet = shm.ShmOutlet(streams, plan, offers[stage])
    elif kind == "p2p":
        links.outlet = P2POutlet(streams, plan, device, offers[stage])
    else:
        links.outlet = NixlOutlet(streams, plan, device, offers[stage])
    return links.outlet.answer


def _complete(links: Links, group: dist.ProcessGroup, answers: list, door: Door) -> None:
    """The ends meet; the last stage takes everybody's connection."""
    if links.outlet is not None:
        links.outlet.complete()
    if links.listener is None:
        return
    links.monitor.gather(links.listener, door.token, group.size() - 1)
    for stage, inlet in links.inlets.items():
        inlet.complete(answers[stage])


def in_step(group: dist.ProcessGroup, do: Callable[[], Any]) -> list:
    """Every stage's `do()`, by stage. Raises on all of them what it raised on the first that failed."""
    try:
        mine = (do(), None)
    except (TapError, ValueError, OSError, RuntimeError) as error:
        mine = (None, error)
    theirs: list = [None] * group.size()
    dist.all_gather_object(theirs, mine, group=group)
    if mine[1] is not None:
        raise mine[1]
    for stage, (_, error) in enumerate(theirs):
        if error is not None:
            raise type(error)(f"stage {stage}: {error}") from None
    return [value for value, _ in theirs]
