"""A DFlash or DSpark checkpoint that we write, read by upstream 0.9.0: the same loss and metrics on the same batch.

    python tests/parity/dflash_round_trip.py /tmp/upstream/bin/python [dflash|dspark ...]     # our environment, then upstream's interpreter

Every recorded case is loaded, moved by one optimizer step, saved, and run here and there.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from speculators_nb.config import SpeculatorModelConfig
from speculators_nb.model import SpeculatorModel

HERE = Path(__file__).parent
FIXTURES = HERE.parent / "fixtures"

for algorithm in sys.argv[2:] or ("dflash", "dspark"):
    with tempfile.TemporaryDirectory() as tmp:
        mine = {}
        for case in sorted(FIXTURES.glob(f"{algorithm}_*")):
            model = SpeculatorModel.registered_class(algorithm)(SpeculatorModelConfig.from_pretrained(case / "saved_pretrained"))
            model.load_state_dict(load_file(case / "state_dict.safetensors"))
            args, batch = json.loads((case / "outputs.json").read_text())["training_args"], load_file(case / "inputs.safetensors")
            kwargs = model.get_trainer_kwargs(**args)[0] | dict(cross_document_targets=True)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            model(**batch, **kwargs)[1].backward()
            optimizer.step()
            folder = Path(tmp) / case.name
            model.save_pretrained(folder)
            save_file(batch, folder / "inputs.safetensors")
            (folder / "call.json").write_text(json.dumps({k: v for k, v in args.items() if k != "loss_implementation"}))
            _, loss, metrics = model(**batch, **kwargs)
            mine[case.name] = dict(loss=loss.item(), metrics={k: float(v) for k, v in metrics.items()})
        out = subprocess.run([sys.argv[1], str(HERE / f"make_{algorithm}_cases.py"), "--load", *(str(Path(tmp) / name) for name in mine)], capture_output=True, text=True)
        found = [json.loads(line) for line in out.stdout.splitlines() if line.startswith('{"loss"')]
        assert len(found) == len(mine), out.stderr[-2000:]
        for (name, a), b in zip(mine.items(), found):
            assert a["metrics"].keys() == b["metrics"].keys()
            gap = abs(a["loss"] / b["loss"] - 1), max(abs(a["metrics"][k] - b["metrics"][k]) / max(1, abs(b["metrics"][k])) for k in a["metrics"])
            print(f"{name}: loss {a['loss']:.6f} here, {b['loss']:.6f} there; largest relative gap: loss {gap[0]:.1e}, metrics {gap[1]:.1e}")
            assert max(gap) < 1e-5
