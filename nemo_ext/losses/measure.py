"""One process's part of the loss benchmark: the block drafts' loss, forward and backward, in chunks and whole.

Legend: N rows, H hidden size, V vocabulary, R Markov rank.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from nemo_ext.losses.block_loss import LossTerms, Teacher, block_loss

TERMS = {
    "dflash": LossTerms(),
    "dspark": LossTerms(cross_entropy=0.1, total_variation=0.9, hard_labels=True),
}


@dataclass(frozen=True)
class Work:
    """Every row has a teacher row, a label and a weight of its own; the head is the policy's, without a gradient."""

    kind: str
    rows: int
    vocab: int
    hidden: int
    markov_rank: int
    chunk_rows: int


@dataclass(frozen=True)
class Measure:
    """Of forward and backward together. `peak_bytes` is over what the inputs take."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    loss: float
    gradient_norm: float


def measure(work: Work, form: str, threads: int) -> Measure:
    """Runs a form once, in a process that does nothing else: `chunked`, `one_chunk` (the same sweep) or `dense`."""
    torch.set_num_threads(threads)
    _run(Work(work.kind, 4, 64, 16, 4, 2), form)
    inputs = _Inputs(work)
    before = memory("VmRSS")
    start, cpu_start = time.perf_counter(), time.process_time()
    loss = _run(work, form, inputs)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = memory("VmHWM") - before
    squares = sum(float(t.grad.double().square().sum()) for t in inputs.learnt())
    return Measure(seconds, cpu_seconds, peak, loss, squares**0.5)


class _Inputs:
    def __init__(self, work: Work):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape, scale=1.0):
            return torch.randn(*shape, generator=generator).mul_(scale)

        self.student_NH = normal(work.rows, work.hidden).requires_grad_()
        self.teacher_NH = normal(work.rows, work.hidden)
        self.head_VH = normal(work.vocab, work.hidden, scale=work.hidden**-0.5)
        self.labels_N = torch.randint(work.vocab, (work.rows,), generator=generator)
        self.weight_N = torch.rand(work.rows, generator=generator) / work.rows
        self.markov_NR = self.markov_head_VR = None
        if work.kind == "dspark":
            self.markov_NR = normal(work.rows, work.markov_rank).requires_grad_()
            self.markov_head_VR = normal(work.vocab, work.markov_rank, scale=work.markov_rank**-0.5).requires_grad_()

    def learnt(self) -> list[torch.Tensor]:
        return [t for t in (self.student_NH, self.markov_NR, self.markov_head_VR) if t is not None]


def _run(work: Work, form: str, inputs: _Inputs | None = None) -> float:
    inputs = inputs or _Inputs(work)
    if form == "dense":
        loss = _dense(inputs, TERMS[work.kind])
    else:
        teacher = Teacher(inputs.teacher_NH, inputs.head_VH, torch.arange(work.rows), inputs.labels_N)
        loss = block_loss(
            inputs.student_NH,
            inputs.head_VH,
            teacher,
            inputs.weight_N,
            TERMS[work.kind],
            markov_NR=inputs.markov_NR,
            markov_head_UR=inputs.markov_head_VR,
            chunk_rows=work.chunk_rows if form == "chunked" else work.rows,
        ).loss
    loss.backward()
    return float(loss.detach())


def _dense(inputs: _Inputs, terms: LossTerms) -> torch.Tensor:
    """As one writes it down: all logits at once, autograd for the gradient, and the same figures of each row."""
    y_NV = inputs.student_NH @ inputs.head_VH.T
    if inputs.markov_NR is not None:
        y_NV = y_NV + inputs.markov_NR @ inputs.markov_head_VR.T
    q_NV = torch.softmax(inputs.teacher_NH @ inputs.head_VH.T, dim=-1)
    if terms.hard_labels:
        row_N = terms.cross_entropy * F.cross_entropy(y_NV, inputs.labels_N, reduction="none")
    else:
        row_N = terms.cross_entropy * F.cross_entropy(y_NV, q_NV, reduction="none")
    if terms.total_variation:
        row_N = row_N + terms.total_variation * (torch.softmax(y_NV, dim=-1) - q_NV).abs().sum(-1)
    with torch.no_grad():
        torch.minimum(torch.softmax(y_NV, dim=-1), q_NV).sum(-1)  # acceptance of sampled drafts
        q_NV.gather(-1, y_NV.argmax(-1, keepdim=True))  # of greedy ones
    return torch.dot(inputs.weight_N, row_N)


def memory(field: str, file: str = "/proc/self/status") -> int:
    """Bytes, from the kernel: of this process `VmRSS` now and `VmHWM` at the highest."""
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{file} has no {field}; the loss benchmark needs Linux")
