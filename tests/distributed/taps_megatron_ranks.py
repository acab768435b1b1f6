"""What the ranks of `test_taps_megatron` run: Megatron's schedules over a tiny policy, with a channel and without."""

import hashlib
import os
from contextlib import nullcontext
from functools import partial

import torch

from nemo_ext.local import megatron_cpu  # noqa: F401  (before megatron.core)

# isort: split
from nemo_ext.cotrain.target import embed_rows
from nemo_ext.layout import PackedLayout
from nemo_ext.local.schedule import forward_backward
from nemo_ext.taps import Rows, open_channel
from tests.distributed.local_policy_ranks import Trainer, pack_layout, parallel, run_model
from tests.distributed.taps_ranks import keep_last_words

DEPTH = 3  # of the halo
OFF = "off"


class TappedTrainer(Trainer):
    """`Trainer` whose forward step has a channel, or none, and keeps what lands."""

    channel = None

    def open_channel(self, taps, transport):
        self.channel = open_channel(
            self.ddp,
            taps,
            self.groups.pp,
            width=self.config["hidden_size"],
            dtype=torch.float32,
            max_rows=256,
            max_embedding_rows=320,
            transport=transport,
        )

    def layout(self, pack) -> PackedLayout:
        return pack_layout(pack, self.groups)

    def gradients(self, packs, repeat: int = 1) -> tuple[list, str, object]:
        """Landed microbatches of the last step (last stage only), the digest of the gradients, the channel's stats."""
        denominator = sum(len(tokens) - 1 for pack in packs for tokens in pack)
        scattered = self.groups.tp.size() if self.chunks[0].config.sequence_parallel else 1
        layouts = [self.layout(pack) for pack in packs]
        rows = [Rows(one.local_total // scattered, len(one.halo(DEPTH).rows)) for one in layouts]
        for _ in range(repeat):
            self.landed = []
            self.optimizer.zero_grad()
            with self.channel.step(rows) if self.channel else nullcontext():
                forward_backward(self.ddp, partial(self.forward_step, denominator=denominator), packs, self.groups)
        digest = hashlib.sha256()
        for ddp in self.ddp:
            for parameter in ddp.params_with_grad:
                digest.update(parameter.main_grad.numpy().tobytes())
        return self.landed, digest.hexdigest(), self.channel and self.channel.stats

    def forward_step(self, iterator, model, denominator):
        if self.channel is None:
            return super().forward_step(iterator, model, denominator)
        pack = None

        def noted(packs):
            nonlocal pack
            pack = next(packs)
            yield pack

        def embed():
            layout = self.layout(pack)
            ids_E = layout.pack(pack)[layout.halo(DEPTH).rows]
            return embed_rows(self.chunks[0].embedding.word_embeddings, ids_E, self.groups.tp)

        pack = next(iterator)
        with self.channel.forward(model, embed) as landing:
            output, loss_function = super().forward_step(iter([pack]), model, denominator)

        def loss(logits_1TV):
            total, count, metrics = loss_function(logits_1TV)
            self.landed.append((landing.taps(), landing.embedding().clone(), landing.hidden))
            # Stands for a draft loss: taps and embedding rows are read in the backward as well.
            reader = torch.ones((), requires_grad=True)
            read = sum((x * reader).square().sum() for x in (landing.taps(), landing.embedding()))
            return landing.freed_after(total + 0.0 * read), count, metrics

        return output, loss


def tapped_step(rank, world_size, config, tensors, packs, sizes, taps, transport, options):
    """One batch twice over: landed microbatches, gradient digest and stats; without a channel for transport OFF."""
    with parallel(sizes) as groups:
        trainer = TappedTrainer(config, tensors, groups, vpp=sizes.get("vpp"), **options)
        if transport != OFF:
            trainer.open_channel(taps, transport)
        try:
            return trainer.gradients(packs, repeat=2)
        finally:
            if trainer.channel is not None:
                trainer.channel.close()


def evaluation(rank, world_size, config, tensors, packs, sizes, taps) -> tuple[bool, list]:
    """A forward-only run through the same forward step, outside a step: whether anything is hooked, what landed."""
    with parallel(sizes) as groups:
        trainer = TappedTrainer(config, tensors, groups)
        trainer.open_channel(taps, "auto")
        trainer.landed = []

        def forward_step(iterator, model):
            pack = next(iterator)
            with trainer.channel.forward(model) as landing:
                output = run_model(model, pack, trainer.layout(pack))
            trainer.landed.append(landing)
            return output, lambda logits: (logits.sum(), torch.tensor(1, dtype=torch.int), {})

        forward_backward(trainer.ddp, forward_step, packs, groups, forward_only=True)
        hooked = any(layer._forward_hooks for chunk in trainer.chunks for layer in chunk.decoder.layers)
        trainer.channel.close()
        return hooked, trainer.landed


def plain_capture(rank, world_size, config, tensors, packs, sizes, taps, options) -> list:
    """Taps, embedding rows and final hidden rows of each microbatch by plain hooks on a policy without stages."""
    with parallel(sizes) as groups:
        trainer = TappedTrainer(config, tensors, groups, **options)
        (model,) = trainer.chunks
        kept = {}

        def keep(name, value):
            kept[name] = value.detach().clone().flatten(0, 1)

        for layer in taps:
            model.decoder.layers[layer].register_forward_hook(lambda _m, _i, out, layer=layer: keep(layer, out[0]))
        model.output_layer.register_forward_pre_hook(lambda _m, inputs: keep("hidden", inputs[0]))
        captured = []
        for pack in packs:
            layout = trainer.layout(pack)
            with torch.no_grad():
                run_model(model, pack, layout)
            ids_E = layout.pack(pack)[layout.halo(DEPTH).rows]
            embedded = embed_rows(model.embedding.word_embeddings, ids_E, groups.tp)
            captured.append((torch.cat([kept[layer] for layer in taps], dim=-1), embedded, kept["hidden"]))
        return captured


def killed_in_a_schedule(rank, world_size, config, tensors, packs, sizes, taps, culprit, folder):
    """A stage dies in the middle of Megatron's schedule; gives the error of the others, whose last words are kept."""
    keep_last_words(folder, rank)
    with parallel(sizes) as groups:
        trainer = TappedTrainer(config, tensors, groups)
        trainer.open_channel(taps, "auto")
        if rank == culprit:
            layer = trainer.chunks[0].decoder.layers[0]
            layer.register_forward_hook(lambda *_: os.kill(os.getpid(), 9) if layer.current_microbatch == 2 else None)
        try:
            trainer.gradients(packs)
        except RuntimeError as error:
            return type(error).__name__, str(error)
        finally:
            trainer.channel.close()
