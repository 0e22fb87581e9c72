"""Real tensors on a CPU that pretend to be on a CUDA device: a tensor made on the wrong device is found without one.

Within `PretendCuda()` every function of torch is looked at: what is made with device="cuda" is marked, results of
marked tensors are marked, and where CUDA would refuse to mix marked tensors with others an AssertionError says which
function did. `tensor.device` and `tensor.is_cuda` answer by the mark. Values are those of the CPU, so data-dependent
code (`nonzero`, `int(...)`, `tolist`) takes its real way; `waits` lists where it did, since there the host would wait
for the device. `copies` lists where numbers of the host went to the device without `non_blocking=True`: that waits too,
and so does an index that is on the host, or a number that is put at the places of an index.
Backward passes are not looked at.
"""

import traceback

import torch
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
INDEXING = {torch.Tensor.__getitem__}  # a tensor on CUDA may be indexed by one on the CPU
MOVING = {torch.Tensor.copy_, torch.Tensor.__setitem__}  # these copy between devices


def marked(x):
    return getattr(x, "on_cuda", False)


def tensors_in(x):
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from tensors_in(part)
    elif isinstance(x, dict):
        for part in x.values():
            yield from tensors_in(part)


def is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


def mark(x, on):
    for tensor in tensors_in(x):
        tensor.on_cuda = on
    return x


def on_cuda(module):
    """Mark a module's parameters and buffers, as `module.to("cuda")` would move them."""
    mark([*module.parameters(), *module.buffers()], True)
    return module


# the host needs a value, or the size of the result
WAITING = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "is_nonzero"}
WAITING |= {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "allclose"}
WAITING |= {"multinomial"}  # checks its weights


def copies_numbers(name, args, kwargs):
    """Whether a call puts numbers of the host into a tensor of a CUDA device: an index, or what is put at an index."""
    if name == "copy_":
        return marked(args[0]) and not marked(args[1]) and not (kwargs.get("non_blocking") or (*args, None)[2])
    if name not in ("__getitem__", "__setitem__") or not marked(args[0]):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    by_tensor = any(isinstance(i, (list, torch.Tensor)) for i in index)
    if any(isinstance(i, list) or (isinstance(i, torch.Tensor) and not marked(i)) for i in index):
        return True
    # a number fills a slice; at the places of a tensor it is a tensor of the host
    number = name == "__setitem__" and not isinstance(args[2], torch.Tensor)
    return name == "__setitem__" and (by_tensor if number else not marked(args[2]))


def waits(name, args, kwargs):
    """Whether a call on tensors of a CUDA device makes the host wait for it."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and marked(args[1] if len(args) > 1 else kwargs.get("repeats"))
    if name in ("__getitem__", "__setitem__", "index_put_", "index_put"):  # by truth values: as many as are true
        return any(marked(i) and i.dtype in (torch.bool, torch.uint8) for i in tensors_in(args[1]))
    return name in WAITING and any(map(marked, tensors_in((args, kwargs))))


class PretendCuda(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.waits = []  # names of functions and lines that called them
        self.copies = []  # the same, to the device

    def note(self, name, found=None):
        """A wait, and the line of the library that it is in. Copies that a library under it makes are not ours."""
        stack = [f for f in traceback.extract_stack() if f.filename != __file__]
        frames = [f for f in stack if "speculators_nb" in f.filename]
        if found is not None and frames and frames[-1] is not stack[-1]:
            return
        where = f" in {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
        (self.waits if found is None else found).append(name + where)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:
            return CUDA if marked(args[0]) else func(*args)
        if func == torch.Tensor.is_cuda.__get__:
            return marked(args[0])
        name = getattr(func, "__name__", str(func))
        if waits(name, args, kwargs):
            self.note(name)
        if copies_numbers(name, args, kwargs):
            self.note(name, self.copies)
        if name in ("to", "cpu", "cuda"):
            return self.move(func, name, args, kwargs)
        there = list(tensors_in((args, kwargs)))
        target, some = kwargs.get("device"), any(map(marked, there))
        loose = [t for t in there if not marked(t) and t.dim() > 0]
        allowed = func in MOVING or (func in INDEXING and marked(args[0])) or target is not None
        if some and loose and not allowed:
            raise AssertionError(
                f"{name}: a tensor of shape {tuple(loose[0].shape)} is on the CPU, the others are on cuda:0"
            )
        generator = kwargs.get("generator")
        if is_cuda(target):
            if generator is not None:
                raise AssertionError(f"{name}: a generator on the CPU draws for a tensor on cuda:0")
            kwargs = kwargs | dict(device="cpu")
            if name in ("tensor", "as_tensor", "new_tensor"):
                self.note(name, self.copies)
        result = func(*args, **kwargs)
        if func in MOVING or (name.endswith("_") and not name.startswith("_")):
            return result  # in place: the tensor stays where it is
        return mark(result, is_cuda(target) if target is not None else some)

    def move(self, func, name, args, kwargs):
        """`to`, `cpu` and `cuda`, by device, dtype or another tensor."""
        first, *rest = args
        target = kwargs.get("device", next((a for a in rest if isinstance(a, (str, torch.device, torch.Tensor))), None))
        rest = [a for a in rest if not isinstance(a, (str, torch.device))]
        kwargs = {k: v for k, v in kwargs.items() if k != "device"}
        if isinstance(target, torch.Tensor):
            on = marked(target)
        else:
            on = name == "cuda" or is_cuda(target) if target is not None or name != "to" else marked(first)
        if marked(first) and not on:
            self.note("to the CPU")
        if on and not marked(first) and not kwargs.get("non_blocking"):
            self.note("to the device", self.copies)
        result = first.to(*rest, **kwargs) if rest or kwargs else first
        if result is first and on != marked(first):
            result = first.view_as(first) if first.requires_grad else first.detach()
        return mark(result, on) if result is not first else result
