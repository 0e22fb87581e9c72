"""All runs of an experiment's folder on one HTML page.
It has a table to sort, acceptance curves to lay over each other, and the best run beside the worst in the step
debugger. One file, no library, no network."""

import json
import os
from html import escape
from pathlib import Path
from typing import cast

import pandas as pd
from transformers import AutoTokenizer

from ..core.files import atomic_write
from ..decode.generate import Generation, generate
from ..models.base import SpeculatorModel
from ..report.page import Section, page_html
from ..widgets.debugger import Debugger, debug
from ..widgets.widget import embed
from .experiment import heldout_setting
from .grid import Experiment, Measured, read_experiment, read_run
from .paired import KEYS, LENGTH, measures, results_table
from .shipped import read_corpus, shipped_data


def debugger_line(
    *folders: str,  # of runs
    prompt: int | None = None,  # None: the first
) -> str:  # Python
    "What opens runs in the debugger, in a notebook that imports `debug_runs`."
    given = [json.dumps(folder, ensure_ascii=False) for folder in folders]
    given += [] if prompt is None else [f"prompt={prompt}"]
    return f"debug_runs({', '.join(given)})"


def runs_table(
    found: Experiment,  # from `experiment` or `read_experiment`
) -> pd.DataFrame:  # a row for each run: setting, seed, arguments, "K = 4", …, drafter, debugger
    "Every run with what it was trained with and its mean acceptance lengths."
    table = found.runs.drop(columns="folder").set_index(["setting", "seed"])
    for k in sorted(found.counts.k.unique()):
        table[f"K = {k}"] = measures(found.counts, k)[LENGTH].round(3)
    folders = found.runs.set_index(["setting", "seed"]).folder
    table = table.assign(drafter=folders + "/drafter", debugger=folders.map(debugger_line))
    return table.reset_index()


def curves(
    found: Experiment,
) -> list[dict]:  # name, setting, rates [k] at the longest draft length; in the order of `runs`
    "Acceptance rates by position of every run."
    k = int(found.counts.k.max())
    rates = measures(found.counts, k).drop(columns=LENGTH).round(4)
    keys = zip(found.runs.setting, found.runs.seed)
    return [
        dict(name=f"{setting}, seed {seed}", setting=setting, rates=rates.loc[key].tolist())
        for key in keys
        for setting, seed in [key]
    ]


def _drafters(folders):
    "The name of each run -> its drafter, its longest draft length."
    found, verifier = {}, shipped_data() / "tiny-verifier"  # where it is now
    for folder in folders:
        row, counts = read_run(Path(folder))
        name = f"{row['setting']}, seed {row['seed']}"
        name = f"{name} ({Path(folder).name})" if name in found else name
        model = SpeculatorModel.from_pretrained(Path(folder) / "drafter", verifier=verifier)
        found[name] = model.drafter(), int(counts.k.max())
    return found


def debug_runs(
    *folders: str | os.PathLike,  # of finished runs of an experiment
    prompt: int = 0,  # of the held-out ones, as in `counts`
) -> Debugger:
    """Step through what runs' drafters write to one held-out prompt, greedily. Errors:
    FileNotFoundError for a folder without a finished run, ValueError for a prompt that is none,
    and for a drafter of a class that is not imported."""
    if not folders:
        raise ValueError("folders=(): is empty; name the folder of a run")
    drafters = _drafters(folders)
    setting = heldout_setting({name: drafter for name, (drafter, _) in drafters.items()}, None)
    if not 0 <= prompt < len(setting.prompts):
        raise ValueError(f"prompt={prompt}: is not held out; give one of 0 to {len(setting.prompts) - 1}")
    answers = {}
    for name, (drafter, k) in drafters.items():
        answer = generate(
            setting.verifier,
            drafter,
            setting.prompts[prompt],
            max_new_tokens=Measured().max_new_tokens,
            k=k,
            eos_token_ids=setting.eos_token_ids,
            record=5,
        )
        answers[name] = cast(Generation, answer)
    return debug(answers, AutoTokenizer.from_pretrained(shipped_data() / "tiny-verifier"))


def best_and_worst(
    found: Experiment,
) -> tuple[list[tuple[str, int]], int]:  # (setting, seed) of one or two runs; a prompt
    "The runs with the longest and the shortest acceptance, and where they are furthest apart."
    k = int(found.counts.k.max())
    ascending = measures(found.counts, k)[LENGTH].sort_values(kind="stable").index.tolist()
    best, worst = ascending[-1], ascending[0]
    counts = found.counts[found.counts.k == k].set_index([*KEYS, "prompt"])
    steps = counts.steps.sort_index()
    saved = cast(pd.Series, steps[worst] - steps[best])
    return list(dict.fromkeys([best, worst])), int(cast(int, saved.idxmax()))


def debugger_section(
    found: Experiment,
) -> Section:  # says why, where the drafters cannot be loaded
    "The best and the worst run in the debugger, on one held-out prompt."
    runs, prompt = best_and_worst(found)
    folders = [found.runs.set_index(KEYS).folder[run] for run in runs]
    lengths = measures(found.counts, int(found.counts.k.max()))[LENGTH]
    named = [f"{name}, seed {seed}: {lengths[name, seed]:.2f}" for name, seed in runs]
    heading = "Step by step"
    try:
        widget = debug_runs(*folders, prompt=prompt)
    except (OSError, ValueError) as e:
        return Section(heading, f"The runs cannot be decoded again here. {e}")
    question = read_corpus(shipped_data() / "corpus/heldout.jsonl")[prompt]["messages"][0]
    line = debugger_line(*folders, prompt=prompt)
    html = (
        '<blockquote style="white-space:pre-line">'
        f"{escape(question['content'])}</blockquote>{embed(widget)}"
        f"<p>The same in a notebook:</p><pre tabindex=0>{IMPORT}\n{escape(line)}</pre>"
    )
    return Section(heading, STEPS.format("; ".join(named)), html=html)


IMPORT = "from speculators_nb.lab.experiment_page import debug_runs"
STEPS = (
    "The runs with the longest and the shortest mean acceptance length over all prompts ({}), "
    "on the held-out prompt on which the first saves the most steps. Green tokens were drafted "
    "and accepted, struck out ones drafted and rejected, bold ones are the verifier's. Click a "
    "step, or move the slider: p is the verifier's probability of a draft token, q the "
    "drafter's."
)


SCRIPT = """
const runs=JSON.parse(document.getElementById('curves').textContent);
const table=document.querySelectorAll('table')[1],body=table.tBodies[0],rows=[...body.rows];
const colours=['#0072b2','#d55e00','#009e73','#cc79a7','#e69f00','#56b4e9','#882255','#999933'];
const names=[...new Set(runs.map(r=>r.setting))],shown=new Set();
const key=(fire)=>e=>{if(e.key=='Enter'||e.key==' '){e.preventDefault();fire()}};
const press=(el,fire)=>{el.tabIndex=0;el.style.cursor='pointer';
 el.onclick=fire;el.onkeydown=key(fire)};
[...table.tHead.rows[0].cells].forEach((head,column)=>{let up=false;press(head,()=>{up=!up;
 const text=r=>r.cells[column].textContent,by=(a,b)=>{const x=text(a),y=text(b);
  return x!==''&&y!==''&&!isNaN(x)&&!isNaN(y)?x-y:x.localeCompare(y)};
 [...body.rows].sort((a,b)=>up?by(a,b):by(b,a)).forEach(r=>body.append(r));
 for(const c of table.tHead.rows[0].cells)c.removeAttribute('aria-sort');
 head.setAttribute('aria-sort',up?'ascending':'descending')})});
const NS='http://www.w3.org/2000/svg',svg=document.createElementNS(NS,'svg');
svg.setAttribute('viewBox','0 0 720 320');svg.setAttribute('role','img');
svg.setAttribute('aria-label','acceptance rate by draft position of the chosen runs');
table.closest('figure').before(svg);
const add=(tag,at,text)=>{const e=document.createElementNS(NS,tag);
 for(const[k,v]of Object.entries(at))e.setAttribute(k,v);
 e.textContent=text??'';svg.append(e);return e};
const depth=Math.max(...runs.map(r=>r.rates.length));
const X=i=>50+(depth>1?i/(depth-1):0)*470,Y=v=>280-v*260;
function draw(){svg.replaceChildren();const ink={fill:'currentColor','font-size':12};
 for(const v of[0,.25,.5,.75,1]){add('line',{x1:50,x2:520,y1:Y(v),y2:Y(v),stroke:'#8884'});
  add('text',{x:44,y:Y(v)+4,'text-anchor':'end',...ink},v)}
 for(let i=0;i<depth;i++)add('text',{x:X(i),y:298,'text-anchor':'middle',...ink},i+1);
 add('text',{x:285,y:316,'text-anchor':'middle',...ink},'draft position');
 let line=0;for(const i of shown){const r=runs[i],colour=colours[names.indexOf(r.setting)%8];
  const last=r.rates.length-1;
  const points=r.rates.map((v,j)=>X(j)+','+Y(v)).join(' ');
  add('polyline',{points,fill:'none',stroke:colour,'stroke-width':2});
  if(line<18)add('text',{x:530,y:24+15*line,fill:colour,'font-size':12},r.name);line++;
  add('circle',{cx:X(last),cy:Y(r.rates[last]),r:3,fill:colour})}}
rows.forEach((row,i)=>{const line=row.lastElementChild;line.style.userSelect='all';
 line.onclick=e=>e.stopPropagation();const turn=()=>{shown.has(i)?shown.delete(i):shown.add(i);
 row.style.fontWeight=shown.has(i)?600:'';row.setAttribute('aria-selected',shown.has(i));draw()};
 press(row,turn);if(runs.findIndex(r=>r.setting==runs[i].setting)==i)turn()});draw();
"""


def write_runs_page(
    folder: str | os.PathLike,  # of an experiment
    path: str | os.PathLike | None = None,  # of the HTML file; None: index.html in the folder
    baseline: str | None = None,  # setting that others are compared with; None: the first
    found: Experiment | None = None,  # these runs; None: all in the folder
) -> Path:  # of the file
    """A page of all runs of a folder. Errors: FileNotFoundError where there is none,
    ValueError for a baseline that is none of the settings."""
    found = found or read_experiment(folder)
    k = int(found.counts.k.max())
    head = (
        "Click a column's head to sort, a row to draw its curve or to take it away. The last "
        f"column opens a run in the debugger, in a notebook after “{IMPORT}”."
    )
    sections = [
        Section(
            "Settings",
            "Mean acceptance length over the seeds, and paired differences: 95 % intervals.",
            {f"{k} draft tokens a step": results_table(found.counts, k, baseline)},
        ),
        Section("Runs", head, {"Every run": runs_table(found)}),
        debugger_section(found),
    ]
    facts = {
        "folder": os.fspath(folder),
        "runs": len(found.runs),
        "held-out prompts": found.counts.prompt.nunique(),
    }
    page = page_html("Runs of an experiment", sections, facts)
    data = json.dumps(curves(found)).replace("<", "\\u003c")
    more = f'<script type="application/json" id="curves">{data}</script><script>{SCRIPT}</script>'
    path = Path(path or Path(folder) / "index.html")
    with atomic_write(path) as temporary:
        temporary.write_text(page.replace("</html>", f"{more}</html>"), encoding="utf-8")
    return path
