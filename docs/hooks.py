"""Additions to `mkdocs build`: links out of docs/, links of function names, equations."""

import ast
import html
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from latex2mathml.converter import convert
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash"}
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(?ms)^```.*?^```")


def targets(text: str, folder: str):
    """Links of a page in `folder`: `(as written, anchor, path from the root)`."""
    for match in LINK.finditer(FENCE.sub("", text)):
        path = normpath(f"{folder}/{match[1]}")
        if "://" not in match[1] and not path.startswith("..") and (ROOT / path).exists():
            yield match[1], match[2] or "", path


def is_in_site(path: str) -> bool:
    """Whether mkdocs shows the file without help: all of docs/ but the programs in it."""
    return path.startswith("docs/") and not path.startswith("docs/make/")


def page_of(path: str) -> str:
    """The page of the site, from its root, that shows a file or a folder of the repository."""
    if path == "README.md":
        return "index.md"
    if is_in_site(path):
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return path
    return f"source/{path}.md" if (ROOT / path).is_file() else f"source/{path}/files.md"


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


def link_functions(markdown: str, script: Path, source: str) -> str:
    """In tables with a column `function`, each name of a function becomes a link to its line.

    The links are HTML, because mkdocs does not know the anchors of lines and would warn.
    """
    known, column, lines = lines_of(script), None, markdown.split("\n")

    def link(match):
        line = known.get((match[1], match[2]) if match[2] else (match[1],))
        if not line:
            return match[0]
        rest = f" in `{match[2]}`" if match[2] else ""
        return f'<a href="{source}#__codelineno-0-{line}">`{match[1]}`</a>{rest}'

    for i, text in enumerate(lines):
        cells = re.split(r"(?<!\\)\|", text)
        if not text.startswith("|"):
            column = None
        elif column is None:
            column = next((j for j, cell in enumerate(cells) if cell.strip() == "function"), -1)
        elif column > 0:
            cells[column] = re.sub(r"`(\w+)`(?: in `(\w+)`)?", link, cells[column])
            lines[i] = "|".join(cells)
    return "\n".join(lines)


def shown(path: str) -> str:
    """A file of the repository as the text of a page, a folder as a list of its files."""
    file = ROOT / path
    if path.endswith(".md"):
        return file.read_text()
    head = f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# {path}\n\n"
    if file.is_file():
        try:
            language = LANGUAGES.get(file.suffix, "text")
            text = file.read_text(encoding="utf-8")
            return f'{head}````{{.{language} linenums="1"}}\n{text}\n````\n'
        except UnicodeDecodeError:  # a picture, or weights
            return f"{head}{file.stat().st_size:,} bytes, not text.\n"
    files = sorted(each.name for each in file.iterdir() if each.is_file())
    here = f"source/{path}"
    return head + "".join(
        f"- [{name}]({relpath(page_of(f'{path}/{name}'), here)})\n" for name in files
    )


def on_files(files, config):
    """Add a page for each file outside of docs/ that a page links to."""
    pages = [file for file in files if file.src_uri.endswith((".md", ".ipynb"))]
    waiting = [
        path
        for file in pages
        for *_, path in targets(file.content_string, f"docs/{file.src_uri}/..")
    ]
    done = set()
    while waiting:
        path = waiting.pop()
        if path in done or is_in_site(path) or path == "README.md":
            continue
        done.add(path)
        files.append(File.generated(config, page_of(path), content=shown(path)))
        if path.endswith(".md"):
            waiting += [each for *_, each in targets(shown(path), str(PurePosixPath(path).parent))]
        elif (ROOT / path).is_dir():
            waiting += [f"{path}/{each.name}" for each in (ROOT / path).iterdir() if each.is_file()]
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to files of the repository become links to their pages."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    folder = f"docs/{uri}/.." if (ROOT / "docs" / uri).exists() else str(PurePosixPath(uri).parent)
    for written, anchor, path in set(targets(markdown, folder)):
        new = relpath(page_of(path), str(PurePosixPath(uri).parent))
        markdown = markdown.replace(f"]({written}{anchor})", f"]({new}{anchor})")
    script = ROOT / f"{Path(uri).stem}.py"
    return (
        link_functions(markdown, script, f"source/{script.name}.html")
        if script.exists()
        else markdown
    )


def mathml(tex: str, display: str) -> str:
    return convert(html.unescape(tex).strip(), display=display)


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


def on_page_content(content, page, config, files):
    """Equations as MathML; of notebooks, which are pages already, the links too."""
    if page.file.src_uri.endswith(".ipynb"):
        for written, anchor, path in set(
            targets(page.file.content_string, f"docs/{page.file.src_uri}/..")
        ):
            new = relpath(page_of(path), str(PurePosixPath(page.file.src_uri).parent))
            new = re.sub(r"\.(md|ipynb)$", ".html", new)
            content = content.replace(f'href="{written}{anchor}"', f'href="{new}{anchor}"')
        page.toc = headings(content)
        text = re.compile(r"(?s)(<div[^>]*jp-RenderedMarkdown[^>]*>)(.*?)(</div>)")
        found = re.compile(r"(?<![\w$\\])\$([^$<]+)\$(?![\w$])")

        def equations(match):
            return match[1] + found.sub(lambda each: mathml(each[1], "inline"), match[2]) + match[3]

        return text.sub(equations, content)
    found = re.compile(r'(?s)<(div|span) class="arithmatex">(?:\\\[|\\\()(.*?)(?:\\\]|\\\))</\1>')
    return found.sub(
        lambda each: mathml(each[2], {"div": "block", "span": "inline"}[each[1]]), content
    )
