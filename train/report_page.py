"""The report of prepared rows as one HTML file that needs nothing else: account, histograms, rows with their mask."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from jinja2 import Environment
from transformers import PreTrainedTokenizerBase

from draftwood.train.mask_view import spans
from draftwood.train.report import ABOUT, HISTOGRAMS, Histogram, RowAccount, by_count
from draftwood.train.rows import supervised_rows

PAGE_FILE = "report.html"
_MAX_TOKENS = 600
_CHART_WIDTH, _CHART_HEIGHT = 360, 110
_SETTINGS = ("max_length", "min_length", "long_rows", "num_validation", "seed", "limit")

_TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rows of {{ names }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --bar: #3a7d5c; --trained: #2e9e5b33; --read: #d9a40055 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem }
table { border-collapse: collapse; margin: .5rem 0 1rem }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
tr.sum td { font-weight: 600; border-top: 2px solid var(--line) }
small { color: GrayText }
figure { display: inline-block; margin: 0 1.5rem 1rem 0 } figcaption { font-size: .85rem }
svg { border-bottom: 1px solid var(--line) } svg rect { fill: var(--bar) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace;
      border: 1px solid var(--line); border-radius: 4px; padding: .7rem }
.context { color: GrayText } .trained { background: var(--trained) } .read { background: var(--read) }
</style>
<h1>Rows of {{ names }}</h1>
<p>{{ account.num_rows | thousands }} conversations read, {{ account.num_kept | thousands }} kept,
{{ account.num_dropped | thousands }} dropped.
<small>{% for key, value in settings %}{{ key }} {{ value }}{{ ", " if not loop.last }}{% endfor %}</small></p>

<h2>What became of every conversation</h2>
{% for source in account.sources %}
<table>
<tr><th>{{ source.name }}{% if source.weight != 1 %} <small>weight {{ "%g" % source.weight }}</small>{% endif %}</th>
<th class="n">rows</th><th class="n">tokens</th><th class="n">supervised</th><th>first case</th></tr>
{% for name, split in source.splits.items() %}
<tr><td>kept: {{ name }}</td><td class="n">{{ (split.rows - split.repeats) | thousands }}</td>
<td class="n">{{ split.tokens | thousands }}</td><td class="n">{{ split.supervised | thousands }}</td>
<td>{% if split.repeats %}and {{ split.repeats | thousands }} repeats by the weight{% endif %}</td></tr>
{% endfor %}
{% for reason, entry in by_count(source.dropped) %}
<tr><td>dropped: {{ about(reason) }}</td><td class="n">{{ entry.rows | length | thousands }}</td><td></td><td></td>
<td><small>{{ entry.example }}</small></td></tr>
{% endfor %}
<tr class="sum"><td>in the source</td><td class="n">{{ source.num_rows | thousands }}</td><td colspan="3"></td></tr>
</table>
{% if source.changes %}
<table>
<tr><th>changes to kept rows of {{ source.name }}</th><th class="n">rows</th><th class="n">times</th></tr>
{% for name, entry in by_count(source.changes) %}
<tr><td>{{ about(name) }}</td><td class="n">{{ entry.rows | length | thousands }}</td>
<td class="n">{{ entry.times | thousands }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% endfor %}

<h2>Training rows</h2>
{% for chart in charts %}
<figure><svg width="{{ width }}" height="{{ height }}" role="img" aria-label="{{ chart.title }} per row">
{% for bar in chart.bars %}<rect x="{{ bar.x }}" y="{{ bar.y }}" width="{{ bar.width }}" height="{{ bar.height }}">
<title>{{ bar.about }}</title></rect>{% endfor %}
</svg><figcaption>{{ chart.title }} per row: {{ chart.about }}</figcaption></figure>
{% endfor %}

<h2>How rows look to the draft</h2>
<p><span class="trained">What it learns to predict</span>, <span class="read">a reply's first token, which it
reads</span>, <span class="context">context</span>.</p>
{% for row in rows %}
<p><small>{{ row.about }}</small></p>
<pre>{% for kind, text in row.spans %}<span class="{{ kind }}">{{ text }}</span>{% endfor %}{{ row.rest }}</pre>
{% endfor %}
</html>
"""


def write_page(
    folder: Path, account: RowAccount, rows: Dataset, tokenizer: PreTrainedTokenizerBase, num_rows: int = 5
) -> None:
    """Writes `report.html` into `folder`, with `num_rows` of the training `rows`, evenly spread, as examples."""
    numbers = sorted(set(np.linspace(0, len(rows) - 1, min(num_rows, len(rows))).astype(int).tolist()))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["thousands"] = "{:,}".format
    html = environment.from_string(_TEMPLATE).render(
        account=account,
        names=", ".join(source.name for source in account.sources),
        settings=[(key, account.settings[key]) for key in _SETTINGS if account.settings.get(key) is not None],
        by_count=by_count,
        about=lambda name: ABOUT.get(name, name),
        charts=[_chart(HISTOGRAMS[name], histogram) for name, histogram in account.histograms.items()],
        width=_CHART_WIDTH,
        height=_CHART_HEIGHT,
        rows=[_example(rows[number], tokenizer) for number in numbers],
    )
    (folder / PAGE_FILE).write_text(html, encoding="utf-8")


def _chart(title: str, histogram: Histogram) -> dict[str, Any]:
    least, _, half, most_usual, most = (f"{value:,.0f}" for value in histogram.quantiles)
    step, top = _CHART_WIDTH / len(histogram.counts), max(1, *histogram.counts)
    bars = []
    for i, count in enumerate(histogram.counts):
        height = round(count / top * (_CHART_HEIGHT - 4), 1)
        low, high = histogram.edges[i] + 0.5, histogram.edges[i + 1] - 0.5
        between = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
        size = {"x": round(i * step, 1), "y": _CHART_HEIGHT - height, "width": round(step - 1, 1), "height": height}
        bars.append({**size, "about": f"{between}: {count:,} rows"})
    return {
        "title": title,
        "bars": bars,
        "about": f"{least} to {most}, half at most {half}, 90 % at most {most_usual}, mean {histogram.mean:,.1f}",
    }


def _example(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    ids, mask = row["input_ids"], row["loss_mask"]
    trained = int(supervised_rows(torch.as_tensor(mask)).sum())
    where = f"row {row['source_row']} of {row['source']}" + (f", id {row['source_id']}" if row["source_id"] else "")
    return {
        "about": f"{where}: {len(ids):,} tokens, {trained:,} trained to be predicted",
        "spans": spans(ids, mask, tokenizer, _MAX_TOKENS),
        "rest": f" ... {len(ids) - _MAX_TOKENS:,} tokens more" if len(ids) > _MAX_TOKENS else "",
    }
