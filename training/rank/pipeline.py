"""Pipeline parallelism (Huang et al. 2019, arXiv:1811.06965): each rank keeps some of the layers, and hands what they
give to the next. PyTorch's schedules say in which order: one pass forward, one backward (Narayanan et al. 2019), or
interleaved, where each rank has two stages (Narayanan et al. 2021, arXiv:2104.04473)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils._pytree import tree_map_only

from training.devices import count_stages, share_layers
from training.errors import SpecError
from training.plan import Plan
from training.rank.data import sequences_of
from training.rank.data_parallel import DataParallel, fill_gradients, put_each, put_in_file
from training.rank.group import Group, Ranks
from training.rank.head import find_head
from training.rank.loss import make_batch
from training.rank.mesh import find_data_group, make_mesh
from training.rank.model import DTYPES, get_base
from training.rank.parallel import Score
from training.rank.passes import Pass, Scores
from training.rank.stages import Cut, Parts, find_homes, find_parts, keep_own, make_cuts, run_trunk, try_cuts

JUDGED_PASSES = 4
"""Of an evaluation, for each rank: as many are made between two looks at whether to stop."""


@dataclass
class Work:
    """Passes that go through all stages together. What is handed on is filled up to `length` tokens. Losses are
    multiplied by `factor` before their gradient is taken."""

    passes: Sequence[Pass[Any]]
    score: Score
    factor: float
    length: int
    scores: dict[int, Scores] = field(default_factory=dict)
    "Of each pass, on the last stage."


class Stage(nn.Module):
    """What PyTorch's schedules call: all ranks have the same rows, so that hidden states alone are handed on, and what
    they are filled up with is not computed."""

    def __init__(self, cut: Cut, parts: Parts, parallel: "Pipeline", handed: Tensor) -> None:
        super().__init__()
        self.cut, self.work = cut, Work([], lambda _: Scores(handed), 1.0, 0)
        self._parts, self._parallel, self._handed = parts, parallel, handed

    def forward(self, received: Tensor | None = None, *, number: Tensor) -> Tensor:
        work, place = self.work, int(number)
        part = work.passes[place]
        batch = make_batch(sequences_of(part.rows), self._parallel.device)
        tokens = batch.input_ids.shape[1]
        own = None if received is None else received[:, :tokens]
        with self._parallel.compute(), self.cut.at_work(self._parts, own):
            if self.cut.is_last:
                scores = work.score(part.rows)
                work.scores[place] = Scores(scores.loss.detach(), scores.sums)
                return scores.loss * (work.factor * part.counts)
            hidden = run_trunk(self._parts, batch.input_ids, batch.position_ids)
        return nn.functional.pad(hidden.to(self._handed.dtype), (0, 0, 0, work.length - tokens))

    def connect(self, group: dist.ProcessGroup | None, length: int, device: torch.device) -> PipelineStage:
        """With buffers for so many tokens a pass."""
        cut, handed = self.cut, self._handed
        like = torch.empty(1, length, handed.shape[-1], dtype=handed.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        given, made = () if cut.is_first else (like,), loss if cut.is_last else like
        return PipelineStage(
            self, cut.number, len(cut.layers_of), device, input_args=given, output_args=made, group=group
        )


class Pipeline(DataParallel):
    """Where rows are shared too, gradients are summed over the copies of a stage once a window. A head that is tied to
    the embeddings is a copy of them on the last rank: both see the sum of their gradients, and take the same steps."""

    steps_by_engine = True
    "What a rank has of the model gives no loss by itself."

    def __init__(self, model: nn.Module, plan: Plan, group: Group) -> None:
        mesh = make_mesh(plan)
        self._line = Ranks(mesh["pipeline"].get_group())
        cuts = make_cuts(share_layers(len(find_parts(model).layers), count_stages(plan.pipeline, plan.schedule)))
        handed = try_whole(model, plan, cuts)
        homes, self._names = find_homes(model, cuts, plan.pipeline), _find_first_names(model)
        self._trained_anywhere = {
            name for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad
        }
        if len({homes[name] for name in self._trained_anywhere}) < plan.pipeline:
            raise _refuse("a rank would have nothing to train; take adapters in all layers, or fewer ranks")
        own = cuts[self._line.rank :: plan.pipeline]
        keep_own(model, own, torch.device(plan.device))
        super().__init__(model, plan, group, find_data_group(mesh))
        self.random_rank = group.rank  # each has layers of its own
        parts = find_parts(model)
        self._stages = [Stage(cut, parts, self, handed) for cut in own]
        self._schedule: Any = None
        self._made_for = (0, 0)
        self._tied, self._is_copy, self._ends = None, False, None
        for name, first in self._names.items():
            if homes[name] != homes[first] and name in self._trained_anywhere:
                self._join_ends(name, first)

    def train_passes(self, passes: Sequence[Pass[Any]], score: Score, weight: float) -> Iterator[Scores]:
        factor = (1.0 if self.loss_scale is None else self.loss_scale.factor) / weight
        made = [scores for some in self._cut_window(passes) for scores in self._run(some, score, factor)]
        self._sum_gradients()
        yield from made

    def score_passes(self, passes: Sequence[Pass[Any]], score: Score) -> Iterator[Scores]:
        together = JUDGED_PASSES * self._line.ranks
        for begin in range(0, len(passes), together):
            for some in self._cut_window(passes[begin : begin + together]):
                yield from self._run(some, score)

    def gather_weights(self) -> dict[str, Tensor]:
        adapted = get_base(self.model) is not self.model
        names = dict.fromkeys(name for name in self._names if not adapted or name in self._trained_anywhere)
        own = {
            name: weight.detach()
            for name, weight in self.model.state_dict(keep_vars=True).items()
            if name in names and name == self._names[name] and not weight.is_meta
        }
        whole = self._collect(own)
        return {name: whole[self._names[name]] for name in names} if self.group.rank == 0 else {}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        put_each(self.model, weights, lambda own, whole: own.is_meta or own.copy_(whole))

    def optimizer_state(self) -> dict[str, Any]:
        state = super().optimizer_state()
        return {**state, "state": self._collect(state["state"])}

    def _find_norm(self, gradients: list[Tensor]) -> Tensor:
        copied = self._tied.grad if self._tied is not None and self._is_copy else None
        own = super()._find_norm([gradient for gradient in gradients if gradient is not copied])
        return self._line.total(own.to(self.device) ** 2).sqrt()

    def _list_names(self) -> list[str]:
        return [self._names[name] for name in super()._list_names()]

    def _join_ends(self, name: str, first: str) -> None:
        """The first and the last rank have the tied weight that is trained."""
        ranks = dist.get_process_group_ranks(self._line.members)
        at_end = self._line.rank in (0, self._line.ranks - 1)
        if at_end:
            self._is_copy = self._line.rank != 0
            self._tied = self._trained[name if self._is_copy else first]
            self._ends = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)

    def _cut_window(self, passes: Sequence[Pass[Any]]) -> list[Sequence[Pass[Any]]]:
        """What goes through the stages together: interleaved, numbers of passes that can be made in equal rounds."""
        count, ranks = len(passes), self._line.ranks
        if len(self._stages) == 1 or count % max(1, count // ranks) == 0:
            return [passes]
        whole = count - count % ranks
        return [passes[:whole], passes[whole:]]

    def _run(self, passes: Sequence[Pass[Any]], score: Score, factor: float | None = None) -> list[Scores]:
        """Make passes, with gradients where there is a factor for their losses; what each comes to, on all ranks."""
        schedule = self._find_schedule(passes)
        work = Work(passes, score, factor or 1.0, self._made_for[1])
        for stage in self._stages:
            stage.work = work
        numbers = torch.arange(len(passes))
        try:
            (schedule.eval if factor is None else schedule.step)(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:  # around what went wrong in a stage
            raise error.__cause__ or error from None
        return self._tell([work.scores[place] for place in sorted(work.scores)])

    def _find_schedule(self, passes: Sequence[Pass[Any]]) -> Any:
        """For so many passes of at most so many tokens: the last one, where it fits."""
        longest = max(sum(row.pass_tokens for row in part.rows) for part in passes)
        length = max(longest, self._made_for[1])
        if self._made_for != (len(passes), length):
            self._schedule = None  # and its buffers, before there are others
            self._made_for = (len(passes), length)
            connected = [stage.connect(self._line.members, length, self.device) for stage in self._stages]
            self._schedule = _make_schedule(connected, len(passes), self._line.ranks)
        return self._schedule

    def _tell(self, scores: Sequence[Scores]) -> list[Scores]:
        """What the last rank knows, to all of the line."""
        numbers = [(float(each.loss), {name: float(value) for name, value in each.sums.items()}) for each in scores]
        told = [numbers]
        dist.broadcast_object_list(told, group=self._line.members, group_src=self._line.ranks - 1)
        return [Scores(_double(loss), {name: _double(value) for name, value in sums.items()}) for loss, sums in told[0]]

    def _sum_gradients(self) -> None:
        if self.data_ranks > 1:
            for weight in fill_gradients(list(self._trained.values()), self.data):
                dist.all_reduce(weight.grad, group=self.data.members)
        if self._tied is not None:
            dist.all_reduce(self._tied.grad, group=self._ends)

    def _collect(self, own: dict[str, Any]) -> dict[str, Any]:
        """What the ranks of the first line have by name, on rank 0, in the host's memory."""
        found: dict[str, Any] = {}
        if self.data_rank:
            return found
        if self._line.rank:
            self._send(own)
            return found
        for source in reversed(range(1, self._line.ranks)):
            found |= self._receive(source)
        return found | own

    def _send(self, value: dict[str, Any]) -> None:
        """To the first rank of the line: how it is made, and then each tensor of it by itself."""
        group = self._line.members
        dist.send_object_list([tree_map_only(Tensor, lambda each: each.to("meta"), value)], group=group, group_dst=0)
        tree_map_only(Tensor, lambda each: dist.send(each.cpu().contiguous(), group=group, group_dst=0), value)

    def _receive(self, source: int) -> dict[str, Any]:
        told: list[Any] = [None]
        dist.recv_object_list(told, group=self._line.members, group_src=source)

        def fill(like: Tensor) -> Tensor:
            whole = torch.empty(like.shape, dtype=like.dtype)
            dist.recv(whole, group=self._line.members, group_src=source)
            return put_in_file(whole, self.scratch)

        value: dict[str, Any] = tree_map_only(Tensor, fill, told[0])
        return value


def _make_schedule(stages: list[PipelineStage], passes: int, ranks: int) -> Any:
    if len(stages) > 1:
        return ScheduleInterleaved1F1B(stages, passes, _same_loss, scale_grads=False)
    kind = Schedule1F1B if passes >= ranks else ScheduleGPipe  # the same where nothing goes back before all is there
    return kind(stages[0], passes, _same_loss, scale_grads=False)


def _same_loss(loss: Tensor, number: Tensor) -> Tensor:  # noqa: ARG001 - a stage knows the targets itself
    return loss


def try_whole(model: nn.Module, plan: Plan, cuts: Sequence[Cut]) -> Tensor:
    """Before anything is taken away; what stages hand on. Raises SpecError for a model that cannot be cut."""
    base = get_base(model)
    with torch.autocast("cpu", DTYPES[plan.precision], enabled=plan.precision != "fp32"):
        find_head(base)  # tries the model once
        handed = try_cuts(model, cuts)
    if handed is None:
        kind = base.config.model_type  # type: ignore[union-attr]
        raise _refuse(f"models of the kind {kind} do more than hand hidden states from layer to layer; leave it at 1")
    return handed


def _find_first_names(model: nn.Module) -> dict[str, str]:
    """Tied weights have several names: the first one of each."""
    firsts: dict[Tensor, str] = {}
    return {name: firsts.setdefault(weight, name) for name, weight in model.state_dict(keep_vars=True).items()}


def _refuse(why: str) -> SpecError:
    param = "parallelism.pipeline"
    return SpecError(f"{param}: {why}", param=param)


def _double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
