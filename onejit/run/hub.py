"""The Hugging Face hub: upload a folder, download a run.

`HF_ENDPOINT` names another server. `hf auth login` or `HF_TOKEN` provides the login.
"""

import contextlib
from pathlib import Path

from onejit.base.packages import check_packages

PREFIX = "hf:"  # of a run on the hub where a command takes a run directory
FOLDER = Path("runs", "hf")


@contextlib.contextmanager
def errors_of_the_hub(about: str):
    """Raise an OSError that begins with `about` for what the hub or the network refuses."""
    try:
        yield
    except Exception as error:  # many kinds: of HTTP, of the hub and of the login
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise OSError(f"{about}: {cause}") from error


def check_repo(option: str, repo: str) -> None:
    """Raise ValueError if a name is not USER/NAME, or huggingface_hub is missing."""
    check_packages(option, ["huggingface_hub"])
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if repo.count("/") != 1:
        raise ValueError(f"{option}: must be USER/NAME")


def check_login(repo: str) -> None:
    """Raise ValueError without a login, OSError if the hub does not know it."""
    option = f"push = {repo}"
    check_repo(option, repo)
    import huggingface_hub

    if not huggingface_hub.get_token():
        raise ValueError(f"{option}: needs a login: `hf auth login` or HF_TOKEN")
    with errors_of_the_hub(option):
        huggingface_hub.HfApi().whoami()


def upload(folder: Path, repo: str, private: bool) -> str:
    """Upload a folder. Files of an existing repository are replaced. Returns its address.

    Raises OSError.
    """
    import huggingface_hub

    advice = f"{folder} is complete; `hf upload {repo} {folder}` uploads it"
    with errors_of_the_hub(f"push = {repo}: {advice}"):
        api = huggingface_hub.HfApi(library_name="onejit")
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repo, commit_message="onejit export")
    return str(url)


def download(repo: str) -> Path:
    """Download a run, `USER/NAME`, to the folder runs/hf/USER/NAME, and return the folder.

    Executes nothing. Raises ValueError if the name is wrong or huggingface_hub is missing, and
    OSError for what the hub or the network refuses.
    """
    check_repo(f"{PREFIX}{repo}", repo)
    import huggingface_hub

    folder = FOLDER / repo
    with errors_of_the_hub(f"{PREFIX}{repo}"):
        huggingface_hub.snapshot_download(repo, local_dir=folder)
    return folder


def code_in(folder: Path) -> list[str]:
    """The files of a run that loading it would execute."""
    files = [*folder.glob("*.py"), *folder.glob("modules/**/*")]
    return sorted(str(path) for path in files if path.is_file())


def local_copy(run_dir: Path, trust: bool) -> Path:
    """The directory of a run; a run `hf:USER/NAME` is downloaded.

    Raises ValueError if a downloaded run contains code, unless `trust`.
    """
    name = str(run_dir)
    if not name.startswith(PREFIX):
        return run_dir
    folder = download(name.removeprefix(PREFIX))
    code = code_in(folder)
    if code and not trust:
        raise ValueError(
            f"{name}: is in {folder} now, and contains code of its sender: {', '.join(code)}; "
            "--trust executes it"
        )
    print(f"{name} is in {folder}")
    return folder
