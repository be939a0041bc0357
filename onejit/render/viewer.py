"""A page with brax's viewer, which plays an episode in a browser."""

import base64
import contextlib
import html
import io
import json
import os
import re
from pathlib import Path
from string import Template
from types import SimpleNamespace

import jax
import numpy as np

from onejit.render.figures import state_at

with contextlib.redirect_stdout(io.StringIO()):  # brax prints which optional packages it lacks
    import brax
    import brax.io.json

VIEWER = Path(__file__).parent.parent / "viewer"  # page.html and package.json
PACKAGES = VIEWER / "node_modules"  # after `npm ci`


def module_files() -> dict[str, Path]:
    """The modules of brax's viewer and its dependencies, by the names of their imports."""
    files = {
        "three": PACKAGES / "three/build/three.module.js",
        "three/addons/controls/OrbitControls.js": PACKAGES
        / "three/examples/jsm/controls/OrbitControls.js",
        "lilgui": PACKAGES / "lil-gui/dist/lil-gui.esm.min.js",
    }
    own = Path(brax.__file__).parent / "visualizer" / "js"
    for name in ("viewer", "animator", "selector", "system"):
        files[name] = own / f"{name}.js"
    return files


def viewer_modules() -> dict[str, str]:
    """The sources of `module_files`. Raises ValueError."""
    modules = {}
    try:
        for name, path in module_files().items():
            source = path.read_text(encoding="utf-8")
            # Inlined modules have no address: relative imports become imports by name.
            modules[name] = re.sub(r"from '\./(\w+)\.js'", r"from '\1'", source)
    except FileNotFoundError as error:
        command = f"npm ci --prefix {os.path.relpath(VIEWER)}"
        raise ValueError(
            f"formats: html needs {error.filename}; run `{command}` once, or use --formats gif"
        ) from None
    return modules


def make_page(title: str, env, states) -> str:
    """A self-contained page that plays brax states [T, ...] in brax's viewer. Raises ValueError."""
    imports = {}
    for name, source in viewer_modules().items():
        code = base64.b64encode(source.encode()).decode()
        imports[name] = f"data:text/javascript;base64,{code}"
    x = jax.tree.map(lambda leaf: np.round(np.asarray(leaf, np.float64), 5), states.x)
    frames = [SimpleNamespace(x=state_at(x, i)) for i in range(len(x.pos))]
    system = env.sys.tree_replace({"opt.timestep": float(env.dt)})
    system = brax.io.json.dumps(system, frames)
    system = system.replace("</", "<\\/")  # must not end the script
    page = Template((VIEWER / "page.html").read_text(encoding="utf-8"))
    return page.substitute(title=html.escape(title), imports=json.dumps(imports), system=system)
