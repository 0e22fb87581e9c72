"""What torch's compiler makes of a tile of the loss for an H100, found without a device: how many kernels, and how many
rows of logits these read.

    python benchmarks/gpu/rows_read.py     prints the table that stands in README.md

It needs neither a torch built for CUDA nor Triton. The functions are traced on the CPU and lowered for a pretended
device by torch's internals, those of the versions in KNOWN; nothing is compiled or run. A row of 32,000 logits is
larger than what a kernel keeps, so one that is needed again is read again. What library kernels read, such as `topk`,
is not counted.
"""

import re
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

try:
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses import fake_tensor
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    from torch.utils import _triton
except ImportError as error:
    raise ImportError(f"torch {torch.__version__} lacks an internal that rows_read.py calls: {error}") from error

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from speculators_nb.nn.losses import LOSSES, _scores
from speculators_nb.nn.token_loss import score_tokens

KNOWN = ("2.11", "2.13")  # versions of torch whose internals are as they are called here
TARGETS, DRAFT_VOCABULARY, VOCABULARY = 2048, 32000, 151936
H100 = SimpleNamespace(
    **dict(name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32),
    **dict(regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024),
    **dict(shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20),
    **dict(shared_memory_per_multiprocessor=233472, gcnArchName="", uuid=""),
)


@contextmanager
def pretended():
    "Inside, torch finds an H100, and Triton."
    properties, yes = (lambda *args: H100), (lambda *args: True)
    found = {
        torch.cuda: dict(
            is_available=yes,
            current_device=lambda: 0,
            get_device_properties=properties,
            get_device_capability=lambda *args: (H100.major, H100.minor),
        ),
        CudaInterface: dict(is_available=yes, current_device=lambda: 0, get_device_properties=properties),
        CudaInterface.Worker: dict(current_device=lambda: 0, get_device_properties=properties),
        fake_tensor: dict(init_gpu_context=lambda *args: None),
        joint_graph: dict(lazy_init=lambda *args: None),  # patterns of attention, which are made on the device
        scheduler: dict(has_triton=yes),
        _triton: dict(triton_hash_with_backend=lambda: ""),
    }
    with ExitStack() as stack:
        for of, names in found.items():
            stack.enter_context(patch.multiple(of, **names))
        yield


@pretended()
def lowered(function, shapes):  # of its arguments: [(shape, dtype)] -> the generated module's source
    mode, device = fake_tensor.FakeTensorMode(), torch.device("cuda", 0)
    with mode:
        on_cpu = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        with patch("torch.compiler.is_compiling", lambda: True):
            # as `torch.compile` traces it: what is changed in place becomes a new tensor
            graph = make_fx(functionalize(function), decomposition_table=select_decomp_table())(*on_cpu)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = node.kwargs | dict(device=device)
        there = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        FakeTensorProp(graph, mode).propagate(*there)
        with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            graph = joint_graph.joint_graph_passes(graph)
            post_grad_passes(graph, True)
            lowering = GraphLowering(graph, example_inputs=there, is_inference=True)
            with V.set_graph_handler(lowering):
                lowering.run(*there)
                return lowering.codegen()[0].value


def reads(source):  # -> of each kernel, how often it reads a row of logits from end to end
    kernels = re.split(r"^triton_\w+ = async_compile", source, flags=re.M)[1:]
    of_a_row = re.compile(r"tl\.load\(\w+ \+ \((?:r0_\d|x0) \+ \d+\*")
    return [len(of_a_row.findall(kernel)) for kernel in kernels]


def tile(loss, slots):
    "A tile of `nn.losses.head_loss`: so many drafts of bfloat16 logits against one target's."

    def scored(target, *drafts):
        losses, correct, _, tokens, grad = _scores.__wrapped__(
            target, list(drafts), None, None, {loss: 1.0}, True, False, True
        )
        return losses[loss], correct, tokens, grad

    drafts = [((TARGETS, DRAFT_VOCABULARY), torch.bfloat16)] * slots
    return lowered(scored, [((TARGETS, DRAFT_VOCABULARY), torch.float32), *drafts])


def tile_of_tokens():
    "A tile of `nn.token_loss.token_loss`."
    shapes = [((TARGETS, VOCABULARY), torch.bfloat16), ((TARGETS,), torch.int64)]
    return lowered(lambda logits, tokens: score_tokens.__wrapped__(logits, tokens, True), shapes)


def main():
    if not torch.__version__.startswith(KNOWN):
        known = " and ".join(KNOWN)
        print(
            f"torch {torch.__version__} is not {known}, of which this calls internals: an error may come from that, "
            "and counts may differ",
            file=sys.stderr,
        )
    print(f"torch {torch.__version__}\n")
    print("| loss | kernels | rows read |\n| --- | --- | --- |")
    sources = {f"`{loss}`, one target and three drafts": tile(loss, 3) for loss, of in LOSSES.items() if of.grad}
    for name, source in (sources | {"`ce` against data tokens (MTP), one draft": tile_of_tokens()}).items():
        found = reads(source)
        print(f"| {name} | {len(found)} | {' + '.join(map(str, found))} |")


if __name__ == "__main__":
    main()
