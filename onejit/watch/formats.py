"""Files of an episode: GIF, MP4, SVG and HTML."""

import contextlib
import html
import io
import itertools
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from PIL import Image

from onejit.base.files import write
from onejit.base.packages import check_packages
from onejit.watch.drawing import Drawing
from onejit.watch.figures import Episode, state_at


def save_gif(frames, seconds: float, file) -> None:
    pictures = (Image.fromarray(frame).quantize() for frame in frames)
    # GIF counts 1/100 s, and browsers slow down below 2/100 s
    milliseconds = 10 * max(2, round(100 * seconds))
    first = next(pictures)
    first.save(file, "GIF", save_all=True, append_images=pictures, duration=milliseconds, loop=0)


def ffmpeg_command(width: int, height: int, seconds: float, path: str) -> list[str]:
    """ffmpeg that reads frames from its standard input."""
    import imageio_ffmpeg  # its `write_frames` forks a process with threads, and misses failures

    source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {1 / seconds:.3f} -i -"
    even_size = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]  # H.264 needs it
    program = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error"]
    target = f"file:{path}"  # or a colon in it would end the name of a protocol
    return [*program, *source.split(), *even_size, "-pix_fmt", "yuv420p", "-f", "mp4", target]


def save_mp4(frames, seconds: float, file) -> None:
    first = next(frames)
    height, width, _ = first.shape
    command = ffmpeg_command(width, height, seconds, file.name)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pipe = process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            for frame in itertools.chain([first], frames):
                pipe.write(frame.tobytes())
        _, messages = process.communicate()
    if process.returncode:
        reason = messages.decode(errors="replace").strip()
        raise ValueError(f"formats: mp4 cannot be written ({reason})")


def save_board_svg(states, length: int, file) -> None:
    """An animation by Pgx's own visualizer."""
    import pgx  # it is needed for board games alone

    boards = [state_at(states, i) for i in range(length)]
    pgx.save_svg_animation(boards, file.name, frame_duration_seconds=1.0)


def brax_page(title: str, env, states) -> str:
    """A page that plays brax states [T, ...] in brax's viewer.

    The viewer's modules are loaded from the network when the page is opened.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # brax prints which optional packages it lacks
        import brax.io.html  # it imports MuJoCo

    x = jax.device_get(states.x)
    frames: Any = [SimpleNamespace(x=state_at(x, i)) for i in range(len(x.pos))]
    system = env.sys.tree_replace({"opt.timestep": float(env.dt)})
    page = brax.io.html.render(system, frames, colab=False)
    heading = f"{html.escape(title)} (the viewer needs the network)"
    page = page.replace("Brax visualizer", heading)
    return page.replace("<body>", f'<body>\n    <p style="position: absolute">{heading}</p>')


def save_episode(form: str, path: Path, title: str, drawing: Drawing, episode: Episode) -> None:
    """Write an episode in one of the formats."""
    if form == "html":
        write(path, brax_page(title, drawing.bodies, episode.states.brax.pipeline_state))
        return
    if form == "svg":
        write(path, partial(save_board_svg, episode.states, len(episode.rewards)))
        return
    frames, seconds = drawing.film(episode)
    save = save_gif if form == "gif" else save_mp4
    write(path, partial(save, frames, seconds))


def check_formats(formats, drawing: Drawing) -> tuple[str, ...]:
    """Check the formats before anything is played, or choose them. Raises ValueError."""
    formats = formats or drawing.default_formats
    if not formats or not set(formats) <= set(drawing.formats):
        possible = f"as {', '.join(drawing.formats)}" if drawing.formats else "in no format"
        raise ValueError(f"formats: this environment can be drawn {possible}")
    packages = list(drawing.packages)
    if "mp4" in formats:
        packages.append("imageio_ffmpeg")
    check_packages(f"formats = {' '.join(formats)}", packages)
    return formats
