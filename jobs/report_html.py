"""Blocks as one HTML file that opens offline and prints, and as Markdown."""

from collections.abc import Sequence
from html import escape

from jobs.report_blocks import Answers, Block, Figure, Heading, Table, Text, Tiles

STYLE = """
:root{color-scheme:light}*{box-sizing:border-box}
body{margin:0;background:#fff;color:#1c1c1c;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,
sans-serif}main{max-width:1120px;margin:0 auto;padding:28px 28px 60px}
header{border-bottom:3px solid #12355b;padding-bottom:10px;margin-bottom:20px;display:flex;flex-wrap:wrap;
justify-content:space-between;align-items:baseline;gap:4px 24px}
h1{font-size:24px;margin:0}header p{margin:0;color:#555;font-size:13px}
h2{font-size:19px;margin:44px 0 12px;padding-top:12px;border-top:1px solid #d0d0d0}
p{margin:10px 0;max-width:86ch}
.answer{font-size:20px;line-height:1.4;font-weight:600;margin:0 0 18px;max-width:70ch}
.warning{border-left:4px solid #1c1c1c;background:#f4f1e8;padding:7px 12px;font-size:14px}
.warning:before{content:"\\26A0\\00A0 ";font-weight:700}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin:0 0 18px}
.tile{border:1px solid #c4c4c4;border-radius:6px;padding:10px 14px}.tile b{display:block;font-size:13px;color:#444;
font-weight:600}.tile span{display:block;font-size:25px;font-weight:650;line-height:1.25;font-variant-numeric:
tabular-nums}.tile small{color:#555;font-size:12.5px;line-height:1.3;display:block}
.wide{overflow-x:auto;margin:14px 0 20px}table{border-collapse:collapse;font-size:13.5px;
font-variant-numeric:tabular-nums}caption{text-align:left;font-weight:600;padding:0 0 6px;font-size:14px}
th,td{padding:4px 12px 4px 0;text-align:right;border-bottom:1px solid #e2e2e2;vertical-align:top}
th:first-child,td:first-child,table.words th,table.words td{text-align:left}
thead th{border-bottom:2px solid #555;vertical-align:bottom}
table:not(.words) td:first-child{white-space:nowrap}
table.words td{max-width:520px;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(480px,100%),1fr));gap:18px 26px;margin:14px 0}
figure{margin:0;max-width:640px}figcaption{font-weight:600;font-size:14px;margin-bottom:4px}
svg{width:100%;height:auto;display:block}
.ask{font-weight:600;margin:18px 0 6px}.ask:before{content:"Prompt: ";color:#555;font-weight:400}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:12px}
.answers div{border:1px solid #c4c4c4;border-radius:6px;padding:8px 12px;font-size:14px;white-space:pre-wrap;
overflow-wrap:anywhere}.answers b{display:block;font-size:12.5px;color:#444}
details{margin:14px 0}summary{cursor:pointer;font-weight:600}
pre{font:12px/1.45 ui-monospace,Menlo,Consolas,monospace;background:#f6f6f6;padding:12px;overflow-x:auto}
@media print{main{max-width:none;padding:0}body{font-size:11pt}figure,.tile,.answers div,tr{break-inside:avoid}
h2{break-after:avoid}.wide{overflow:visible}details{display:none}}
"""


def html(blocks: Sequence[Block], *, title: str, subtitle: str) -> str:
    """One self-contained page: no script, no font, no request to anywhere."""
    out: list[str] = []
    for i, block in enumerate(blocks):
        after_figure = i > 0 and isinstance(blocks[i - 1], Figure)
        if isinstance(block, Figure) and not after_figure:
            out.append("<div class='figures'>")
        if after_figure and not isinstance(block, Figure):
            out.append("</div>")
        out.append(_html(block))
    if blocks and isinstance(blocks[-1], Figure):
        out.append("</div>")
    body = "\n".join(out)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>\n"
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>\n{body}\n</main></body></html>\n"
    )


def markdown(blocks: Sequence[Block], *, title: str, subtitle: str, figures: str = "figures") -> str:
    """The same as Markdown; figures are links to `figures/<name>.svg`."""
    return f"# {title}\n\n{subtitle}\n\n" + "\n\n".join(_markdown(b, figures) for b in blocks) + "\n"


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Text(text, "code"):
            return f"<details><summary>Whole config, as it was run</summary><pre>{escape(text)}</pre></details>"
        case Text(text, kind):
            return f"<p class='{kind}'>{escape(text)}</p>"
        case Tiles(tiles):
            cells = "".join(
                f"<div class='tile'><b>{escape(a)}</b><span>{escape(b)}</span><small>{escape(c)}</small></div>"
                for a, b, c in tiles
            )
            return f"<div class='tiles'>{cells}</div>"
        case Table(head, rows, caption):
            words = " class='words'" if _is_words(rows) else ""
            heads = "".join(f"<th scope='col'>{escape(h)}</th>" for h in head)
            body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
            named = f"<caption>{escape(caption)}</caption>" if caption else ""
            table = f"<table{words}>{named}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
            return f"<div class='wide'>{table}</div>"
        case Figure(name, svg, caption):
            return f"<figure id='{escape(name)}'><figcaption>{escape(caption)}</figcaption>{svg}</figure>"
        case Answers(prompt, answers):
            cells = "".join(f"<div><b>{escape(name)}</b>{escape(text)}</div>" for name, text in answers)
            return f"<p class='ask'>{escape(prompt)}</p><div class='answers'>{cells}</div>"


def _markdown(block: Block, figures: str) -> str:
    match block:
        case Heading(text):
            return f"## {text}"
        case Text(text, "code"):
            return f"Whole config, as it was run:\n\n```json\n{text}\n```"
        case Text(text, "answer"):
            return f"**{_cell(text)}**"
        case Text(text, "warning"):
            return f"> **Note:** {_cell(text)}"
        case Text(text, _):
            return _cell(text)
        case Tiles(tiles):
            return "\n".join(f"- {_cell(a)}: **{_cell(b)}** ({_cell(c)})" for a, b, c in tiles)
        case Table(head, rows, caption):
            ruler = "| " + " | ".join("---" if i == 0 or _is_words(rows) else "---:" for i in range(len(head))) + " |"
            lines = ["| " + " | ".join(_cell(c) for c in row) + " |" for row in (head, *rows)]
            return "\n".join(([f"{caption}:", ""] if caption else []) + [lines[0], ruler, *lines[1:]])
        case Figure(name, _, caption):
            return f"![{_cell(caption)}]({figures}/{name}.svg)"
        case Answers(prompt, answers):
            told = "\n".join(f"- *{name}*: {_cell(text)}" for name, text in answers)
            return f"**Prompt:** {_cell(prompt)}\n\n{told}"


def _is_words(rows: Sequence[Sequence[str]]) -> bool:
    """A table whose second column is text is read as text, not as figures."""
    return any(len(row) > 1 and row[1][:1].isalpha() and row[1] not in ("n/a", "yes", "no") for row in rows)


def _cell(text: str) -> str:
    """Text that cannot be mistaken for Markdown or HTML: model answers may hold either."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + c if c in "\\`*_[]|#" else c for c in flat)
