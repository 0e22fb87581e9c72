"""Bytes that a rank holds at the peak of a training step whose weights are split (FSDP2), tensor by tensor; a rank is a
process on gloo. `test_plan_fsdp.py` sets them beside what `plan` computes.

    torchrun --nproc-per-node 2 tests/distributed/memory.py WIDTH DRAFTER DRAFTER …      the first rank prints JSON"""

import gc
import json
import sys
import weakref

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config

from speculators_nb.distributed.sharding import shard
from speculators_nb.lab.experiment import settings
from speculators_nb.plan.step_memory import step_of

LENGTH, EACH, VOCAB, DEPTH = 384, 128, 2048, 6


def wide_verifier(width, vocab=VOCAB):
    "The config of a verifier of this width."
    return Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=width // 8,
        num_hidden_layers=DEPTH,
        vocab_size=vocab,
    )


class Held(TorchDispatchMode):
    "Bytes of all storages that were seen and are alive, at their size of now: FSDP empties and fills its own."

    def __init__(self, *known):
        super().__init__()
        self.storages, self.most = {}, 0
        self.see(known)

    def see(self, tree):
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                key = storage._cdata
                if key not in self.storages:
                    self.storages[key] = weakref.ref(storage, lambda _, key=key: self.storages.pop(key, None))

    def now(self):
        alive = [reference() for reference in list(self.storages.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.see((args, kwargs, out))
        self.most = max(self.most, self.now())
        return out


def peak_of(name, width, bf16=False):
    "Bytes: the most in a step that adds to gradients which are there, those between two steps, those of the row."
    shape = wide_verifier(width), VOCAB, DEPTH, LENGTH, EACH, 0.75
    model, arguments = step_of(name, *shape, bf16=bf16, **settings(name, 2))
    batch, _ = arguments.pop("batch"), arguments.pop("bf16")
    if dist.is_initialized():
        shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    for step in range(2):
        states = [list(state.values()) for state in optimizer.state.values()]
        held = Held(list(model.parameters()), [p.grad for p in trained], states, batch)
        gc.collect()
        kept = held.now()
        with held:
            torch.manual_seed(0)
            model(**batch, **arguments)[1].backward()
        if not step:
            optimizer.step()  # makes the states
    return held.most, kept, sum(tensor.nbytes for tensor in batch.values())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    width, *names = sys.argv[1:]
    found = {name: peak_of(name, int(width)) for name in names}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
