"""The films of docs/gallery.md, and its list of the agents in agents/.

    pip install -c constraints.txt -e ".[tools]"
    python tools/pages/films.py                        all films
    python tools/pages/films.py ppo_continuous_hopper  the films of these agents alone

`onejit render` draws each agent into .cache/films/, unless its film is there. The films of the page
are small copies of at most 60 frames.
"""

import json
import subprocess
import sys
from pathlib import Path

import yaml
from PIL import Image, ImageSequence

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gallery.md"
DRAWN = ROOT / ".cache" / "films"
WIDTH = 200  # pixels
FRAMES = 60
BEGIN = "<!-- films: begin, written by tools/pages/films.py -->"
END = "<!-- films: end -->"


def draw(agent: Path) -> Path:
    """The film of an agent as `onejit render` draws it."""
    out = DRAWN / agent.name
    if not list(out.glob("*.gif")):
        command = [sys.executable, "-m", "onejit", "render", agent, "--formats", "gif"]
        subprocess.run([*command, "--max-steps", "300", "--out", out], cwd=ROOT, check=True)
    return next(out.glob("*.gif"))


def shrink(film: Path, to: Path) -> None:
    with Image.open(film) as picture:
        step = -(-picture.n_frames // FRAMES)
        duration = step * picture.info["duration"]
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(picture)][::step]
    size = WIDTH, round(WIDTH * frames[0].height / frames[0].width)
    small = [frame.resize(size).quantize(32, dither=Image.Dither.NONE) for frame in frames]
    small[0].save(to, save_all=True, append_images=small[1:], duration=duration, loop=0)


def main():
    cards = []
    for agent in sorted(path.parent for path in ROOT.glob("agents/*/card.json")):
        film = ROOT / "docs" / "figures" / f"film_{agent.name}.gif"
        if not sys.argv[1:] or agent.name in sys.argv[1:]:
            shrink(draw(agent), film)
        card = json.loads((agent / "card.json").read_text())
        config = yaml.safe_load((agent / "config.yaml").read_text())
        env_name = config.get("env_name", "GridWorld")
        cards.append(
            f"- ![{card['script']} plays {env_name}](figures/{film.name})\n\n"
            f"    **{env_name}**, {card['script']}: "
            f"evaluation return {card['greedy_return']:.4g}\n\n"
            f"    `onejit render agents/{agent.name}`\n"
        )
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    grid = '<div class="grid cards" markdown>\n\n' + "\n".join(cards) + "\n</div>"
    PAGE.write_text(f"{before}{BEGIN}\n\n{grid}\n\n{END}{after}")


if __name__ == "__main__":
    main()
