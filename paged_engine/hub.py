"""Find the model behind --model: a path, or a Hugging Face Hub id that is downloaded first.

Only configs, tokenizers, safetensors and GGUF files are asked for: pickles (.bin) are programs.
Runs without torch.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from kvrelay.paged_engine.model_files import INDEX, read_model_config, weight_files
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError

__all__ = ["DownloadFailed", "model_files", "prefetch", "resolve_model"]

log = logging.getLogger("kvrelay.engine")

_DOWNLOADS_AT_A_TIME = 4
_ID = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?P<file>/[^@]+\.gguf)?(?:@(?P<revision>[\w./-]+))?"
)
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX,
)


class DownloadFailed(ConfigError):
    """A file that is missing or damaged; another download may help."""

    exit_code = 1


def resolve_model(config: EngineConfig, check: Callable[[EngineConfig], None]) -> Path:
    """Return the folder or file of the engine's model, downloaded if it is a Hub id.

    A Hub id is org/name or org/name/file.gguf, with @revision if wanted. `check` takes the folder
    of small files before weights are downloaded. Raises ConfigError, and DownloadFailed if another
    try may help.
    """
    model, revision = config.model, config.revision
    found = _ID.fullmatch(model)
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as why:  # no permission; no such user's home
        raise ConfigError(f"model {model[:200]!r} cannot be looked up: {why}") from why
    if exists:
        if revision:
            raise ConfigError(
                f"revision {revision!r} is for models on the Hub, and {model!r} is a path; leave "
                f"it out"
            )
        return path
    if found is None:
        raise ConfigError(
            f"model {model!r} does not exist; pass a folder in Hugging Face layout, a .gguf file "
            f"or a Hub id (org/name)"
        )
    id_revision = found["revision"] or ""
    if revision and id_revision and revision != id_revision:
        raise ConfigError(f"model {model!r} and revision {revision!r} name two revisions; give one")
    return _download(config, found["repo"], revision or id_revision or "main", found["file"], check)


def _download(
    config: EngineConfig,
    repo: str,
    revision: str,
    file: str | None,
    check: Callable[[EngineConfig], None],
) -> Path:
    from huggingface_hub import errors, hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)
    token = config.hf_token or None

    def download(revision: str, names: Sequence[str]) -> Path:
        options: dict[str, Any] = {"token": token, "max_workers": _DOWNLOADS_AT_A_TIME}
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=list(names), **options)
        )

    with _readable_errors(repo, revision):
        if file:
            try:
                return Path(hf_hub_download(repo, file[1:], revision=revision, token=token))
            except errors.LocalEntryNotFoundError:
                raise
            except errors.EntryNotFoundError as why:
                _require(repo, [file[1:]], revision, token)
                raise DownloadFailed(f"{repo} cannot be downloaded: {why}") from why
        # Small files tell whether the large ones are of use.
        folder = download(revision, _SMALL_FILES)
        commit = folder.name  # the branch may move meanwhile
        if not (folder / "config.json").exists():
            _require(repo, ["config.json"], commit, token)
        if config.load_format == "dummy":
            return folder
        weights = weight_files(folder)
        if all((folder / name).exists() for name in weights):
            return folder
        _require(repo, weights, commit, token)
        check(replace(config, model=str(folder)))
        _tokenizer(folder)
        log.info("downloading the weights of %s to %s", repo, folder)
        download(commit, weights)
        return folder


def _tokenizer(folder: Path) -> Path:
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(
            f"{folder} holds no tokenizer.json; add one (transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
        )
    return folder / "tokenizer.json"


def _require(repo: str, names: Sequence[str], revision: str, token: str | None) -> None:
    from huggingface_hub import HfApi

    files = HfApi(token=token).list_repo_files(repo, revision=revision)
    missing, hint = sorted({*names}.difference(files)), ""
    if not missing:
        return
    if gguf := next((file for file in files if file.endswith(".gguf")), None):
        hint = f"; it holds GGUF files, for example --model {repo}/{gguf}"
    elif any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        hint = (
            "; it holds pickled weights, which are programs and never loaded: convert them to "
            "safetensors"
        )
    raise ConfigError(f"{repo} on the Hub holds no {missing[0]}{hint}")


@contextmanager
def _readable_errors(repo: str, revision: str) -> Iterator[None]:
    from huggingface_hub import errors

    # The bases are the root of what any HTTP library raises; RuntimeError is Xet's.
    failures = cast(
        tuple[type[Exception], ...], (*errors.HfHubHTTPError.__bases__, OSError, RuntimeError)
    )
    try:
        yield
    except errors.GatedRepoError as why:
        raise ConfigError(
            f"{repo} is gated; accept its terms on https://huggingface.co/{repo}, then "
            f"give a token of that account with --hf-token or in HF_TOKEN"
        ) from why
    except errors.RepositoryNotFoundError as why:
        raise ConfigError(
            f"there is no folder {repo!r} here and no such model on the Hub; if it is "
            "private, give a token with --hf-token or in HF_TOKEN"
        ) from why
    except errors.RevisionNotFoundError as why:
        raise ConfigError(f"{repo} on the Hub has no revision {revision!r}") from why
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as why:
        offline = isinstance(why, errors.OfflineModeIsEnabled) or isinstance(
            why.__cause__, errors.OfflineModeIsEnabled
        )
        reason = "HF_HUB_OFFLINE forbids to download it" if offline else "the Hub cannot be reached"
        raise DownloadFailed(
            f"{repo} is not, or not wholly, in the cache {_cache()}, and {reason}"
        ) from why
    except errors.HFValidationError as why:
        raise ConfigError(
            f"model {repo!r} is neither a path that exists nor a Hub id: {why}"
        ) from why
    except failures as why:
        raise DownloadFailed(f"{repo} cannot be downloaded: {_reason(why)}") from why


def _reason(why: BaseException) -> str:
    if isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {_cache()} is full; make room, or set HF_HOME to a larger one"
    if getattr(getattr(why, "response", None), "status_code", None) in (401, 403):
        return "the Hub does not accept the token from --hf-token, HF_TOKEN or a stored login"
    text = " ".join(str(why).split()) or type(why).__name__
    return f"{text}; start again: whole files are kept"


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def prefetch(config: EngineConfig) -> dict[str, Any]:
    """Download a model and return its `path`, its size in `bytes` and its `files`.

    Raises ConfigError for a model that no node would serve, DownloadFailed if another try may help.
    """
    path = resolve_model(config, _check_config)
    files = model_files(path, config)
    _check_config(replace(config, model=str(path)))
    return {
        "path": str(path),
        "bytes": sum(file.stat().st_size for file in files),
        "files": [str(file) for file in files],
    }


def model_files(path: Path, config: EngineConfig, *, tokenizer: bool = True) -> list[Path]:
    """Return the files of a model that a node would read; a rank reads no `tokenizer`.

    Raises ConfigError, and DownloadFailed if one is missing or damaged.
    """
    dummy = config.load_format == "dummy"
    if not path.is_dir():
        if path.suffix == ".gguf" and not dummy:
            from kvrelay.paged_engine.gguf_model import GgufFile

            try:
                GgufFile(path)
            except ConfigError as why:
                raise _damaged(path, why) from why
        return [path]
    files = [path / name for name in _SMALL_FILES if (path / name).exists()]
    if dummy:
        return files
    if tokenizer:
        _tokenizer(path)
    weights = [path / name for name in weight_files(path)]
    missing = [file.name for file in weights if not file.exists()]
    if missing:
        raise DownloadFailed(f"{path} lacks {', '.join(missing)}; download it again")
    for file in weights:
        try:
            safe_open(file, framework="np")  # compares the header with the file's size
        except (SafetensorError, OSError) as why:
            raise _damaged(file, why) from why
    return files + weights


def _check_config(config: EngineConfig) -> None:
    read_model_config(config.model, config.load_format)


def _damaged(file: Path, why: Exception) -> DownloadFailed:
    return DownloadFailed(f"{file} is damaged ({why}); delete it and start again")
