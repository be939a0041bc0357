"""Additions to `mkdocs build`: links out of docs/, links of function names, equations, and pages
of the scripts, the configs and all fields.
"""

import ast
import html
import re
import sys
from pathlib import Path
from posixpath import normpath

from latex2mathml.converter import convert
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc

sys.path.insert(0, str(Path(__file__).parent))

import fields

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(?ms)^```.*?^```")
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
# Files with a page of their own, {path from the root: its language}.
SOURCES = {f"{name}.py": "python" for name in SCRIPTS}
for folder, suffix, language in (
    ("examples", "py", "python"),
    ("examples", "mjs", "javascript"),
    ("examples", "cpp", "cpp"),
    ("configs/*", "yaml", "yaml"),
    ("onejit/envs", "py", "python"),
    ("onejit/envs/host", "py", "python"),
):
    for file in sorted(ROOT.glob(f"{folder}/*.{suffix}")):
        SOURCES[file.relative_to(ROOT).as_posix()] = language


def target(written: str) -> str:
    """The path from the root that a link of a page leads to; empty if it leads elsewhere."""
    path = normpath(f"docs/{written}")
    there = "://" not in written and not path.startswith("..") and (ROOT / path).exists()
    return path if there else ""


def source_page(path: str) -> str:
    return f"source/{path}.md"


def link_out(written: str, anchor: str, address: str, suffix: str) -> str | None:
    """The address of a file outside of docs/, None if it has none; empty if it stays as written.

    Scripts and configs have pages, which end with `suffix`. Other files have an address if mkdocs
    knows the repository's.
    """
    path = target(written)
    if not path or path.startswith("docs/"):
        return ""
    if path == "README.md":
        return f"index{suffix}{anchor}"
    if path in SOURCES:
        return source_page(path).removesuffix(".md") + suffix
    return f"{address}/blob/main/{path}{anchor}" if address else None


def with_links(markdown: str, address: str) -> str:
    """Links out of docs/ lead to pages of the site or to the repository; others become code."""

    def replace(match):
        text, written, anchor = match.groups()
        link = link_out(written, anchor or "", address, suffix=".md")
        if link is None:
            return f"`{target(written)}`"
        return f"[{text}]({link})" if link else match[0]

    return outside_of_fences(lambda part: LINK.sub(replace, part), markdown)


def outside_of_fences(change, markdown: str) -> str:
    """Apply `change` to the parts of a page that are no code."""
    fences = FENCE.findall(markdown)
    parts = [change(part) for part in FENCE.split(markdown)]
    return "".join(part + fence for part, fence in zip(parts, [*fences, ""], strict=True))


def lines_of(path: Path) -> dict[tuple[str, ...], int]:
    """The lines of functions and classes, by `(name,)` and by `(name, a function around it)`."""
    found = {}

    def visit(node, around):
        for child in ast.iter_child_nodes(node):
            inner = isinstance(child, (ast.FunctionDef, ast.ClassDef))
            if inner:
                for key in [(child.name,), *((child.name, outer) for outer in around)]:
                    found.setdefault(key, child.lineno)
            visit(child, [*around, child.name] if inner else around)

    visit(ast.parse(path.read_text()), [])
    return found


def link_functions(markdown: str) -> str:
    """Names of functions become links to their lines, in two places.

    These are tables with a column `function`, and the parentheses behind the bold words that begin
    a paragraph, as in "**Target** (`q_target`)". The function is one of the script that the last
    heading `## SCRIPT.py` names. The links are HTML, because mkdocs does not know the anchors of
    lines and would warn.
    """
    known = {}
    source = ""
    column = None
    lines = markdown.split("\n")

    def link(match):
        line = known.get((match[1], match[2]) if match[2] else (match[1],))
        if not line:
            return match[0]
        rest = f" in `{match[2]}`" if match[2] else ""
        return f'<a href="{source}#__codelineno-0-{line}">`{match[1]}`</a>{rest}'

    def with_functions(text):
        return re.sub(r"`(\w+)`(?: in `(\w+)`)?", link, text)

    for i, text in enumerate(lines):
        heading = re.match(r"## (\w+)\.py", text)
        if heading and heading[1] in SCRIPTS:
            known = lines_of(ROOT / f"{heading[1]}.py")
            source = f"source/{heading[1]}.py.html"
        if lead := re.match(r"\*\*[A-Z][^*]*\*\*\.? \([^)]*\)", text):
            lines[i] = with_functions(lead[0]) + text[lead.end() :]
        cells = re.split(r"(?<!\\)\|", text)
        if not text.startswith("|"):
            column = None
        elif column is None:
            column = next((j for j, cell in enumerate(cells) if cell.strip() == "function"), -1)
        elif column > 0:
            cells[column] = with_functions(cells[column])
            lines[i] = "|".join(cells)
    return "\n".join(lines)


def on_files(files, config):
    """Add the page of all fields, and a page for each script and each config."""
    files.append(File.generated(config, "fields.md", content=fields.page()))
    for path, language in SOURCES.items():
        title = path.removeprefix("configs/")
        head = f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# {title}\n\n"
        text = (ROOT / path).read_text(encoding="utf-8")
        page = f'{head}````{{.{language} linenums="1"}}\n{text}\n````\n'
        files.append(File.generated(config, source_page(path), content=page))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links out of docs/, and links of function names."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    if page.file.src_uri == "install.md":
        page.meta["search"] = {"boost": 1.5}  # "GPU" means how to use one, before how fast it is
    return link_functions(with_links(markdown, config["repo_url"]))


def mathml(tex: str, display: str) -> str:
    return convert(html.unescape(tex).strip(), display=display)


def with_column_names(content: str) -> str:
    """Each cell of a table knows the name of its column, which site.css shows on a phone."""

    def table(match):
        titles = re.findall(r"(?s)<th[^>]*>(.*?)</th>", match[0])
        names = [html.unescape(re.sub("<[^>]+>", "", title)) for title in titles]

        def row(match):
            columns = iter(names)
            return re.sub(
                "<td", lambda _: f'<td data-column="{html.escape(next(columns, ""))}"', match[0]
            )

        return re.sub(r"(?s)<tr>.*?</tr>", row, match[0])

    return re.sub(r"(?s)<table>.*?</table>", table, content)


def headings(content: str):
    """Of a notebook's page, code in headings included."""
    found, tokens = (
        re.findall(r'(?s)<h([12]) id="([^"]+)">(.*?)<a class="anchor-link"', content),
        [],
    )
    for level, name, text in found:
        token = {
            "level": int(level),
            "id": name,
            "name": re.sub("<[^>]+>", "", text),
            "children": [],
        }
        (tokens[0]["children"] if level == "2" and tokens else tokens).append(token)
    return get_toc(tokens)


def link_of_notebook(match: re.Match, address: str) -> str:
    """As `with_links`, in HTML. Pages of the site have the suffix .html."""
    written, anchor, text = match.groups()
    link = link_out(written, anchor or "", address, suffix=".html")
    if link is None:
        return f"<code>{target(written)}</code>"
    if not link and target(written):
        link = re.sub(r"\.(md|ipynb)$", ".html", written) + (anchor or "")
    return f'<a href="{link}">{text}</a>' if link else match[0]


def on_page_content(content, page, config, files):
    """Equations as MathML; pictures in full size; names of columns; of notebooks, the links too."""
    if page.file.src_uri.endswith(".ipynb"):
        page.toc = headings(content)
        text = re.compile(r"(?s)(<div[^>]*jp-RenderedMarkdown[^>]*>)(.*?)(</div>)")
        equation = re.compile(r"(?<![\w$\\])\$([^$<]+)\$(?![\w$])")
        link = re.compile(r'(?s)<a href="([^"#]+)(#[^"]*)?">(.*?)</a>')

        def rendered(match):
            inner = equation.sub(lambda each: mathml(each[1], "inline"), match[2])
            links = link.sub(lambda each: link_of_notebook(each, config["repo_url"]), inner)
            return match[1] + links + match[3]

        return text.sub(rendered, content)
    content = with_column_names(content)
    content = re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', content)
    found = re.compile(r'(?s)<(div|span) class="arithmatex">(?:\\\[|\\\()(.*?)(?:\\\]|\\\))</\1>')
    return found.sub(
        lambda each: mathml(each[2], {"div": "block", "span": "inline"}[each[1]]), content
    )
