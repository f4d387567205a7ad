"""Find the model behind --model: a path, or a Hugging Face Hub id that is downloaded first.

Only configs, tokenizers, safetensors and GGUF files are asked for: pickles (.bin) are programs.
Runs without torch.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from kvrelay.paged_engine.model_files import INDEX, read_model_config, weight_files
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError, KvrelayError

__all__ = ["DownloadFailed", "PrefetchFailed", "model_files", "prefetch", "resolve_model"]

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
    """A download that failed; another try may help."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class _Source:
    repo: str
    revision: str
    token: str | None

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def resolve_model(config: EngineConfig, check: Callable[[EngineConfig], None]) -> Path:
    """Return the folder or file of the engine's model, downloaded if it is a Hub id.

    A Hub id is org/name or org/name/file.gguf, with @revision behind it if wanted. `check` takes
    the folder of small files before weights are downloaded, and raises ConfigError for a model that
    cannot be served. Raises ConfigError, and DownloadFailed if another try may help.
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
    if found["file"] and config.load_format == "safetensors":
        raise ConfigError(
            f"load_format safetensors does not read the GGUF file {model!r}; gguf and auto do"
        )
    source = _Source(found["repo"], revision or id_revision or "main", config.hf_token or None)
    _quiet_library()
    with _readable_errors(source):
        if found["file"]:
            return _gguf_file(source, found["file"][1:])
        return _folder(source, config, check)


def _quiet_library() -> None:
    try:
        from huggingface_hub.utils import disable_progress_bars
    except ModuleNotFoundError as why:
        raise ConfigError(
            "a model on the Hub needs huggingface_hub, which is not installed; "
            "pip install huggingface_hub, or pass a path"
        ) from why
    if not sys.stderr.isatty():
        disable_progress_bars()
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _folder(source: _Source, config: EngineConfig, check: Callable[[EngineConfig], None]) -> Path:
    from huggingface_hub import snapshot_download

    if config.load_format == "gguf":
        raise ConfigError(
            f"load_format gguf reads one file, and {source} is a repository; name a file of it "
            "(org/name/file.gguf), or leave load_format out"
        )

    def download(revision: str, names: Sequence[str]) -> Path:
        return Path(
            snapshot_download(
                source.repo,
                revision=revision,
                token=source.token,
                allow_patterns=list(names),
                max_workers=_DOWNLOADS_AT_A_TIME,
            )
        )

    # Small files tell whether the large ones are of use.
    folder = download(source.revision, _SMALL_FILES)
    commit = folder.name  # the branch may move meanwhile
    if not (folder / "config.json").exists():
        raise _lacks(source, "config.json", commit)
    if config.load_format == "dummy":
        return folder
    missing = [name for name in weight_files(folder) if not (folder / name).exists()]
    if missing:
        size = _size(source, missing, commit)
        check(replace(config, model=str(folder)))
        if not (folder / "tokenizer.json").exists():
            raise ConfigError(
                f"{source} on the Hub holds no tokenizer.json; download it, add one (transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it) and pass the "
                "folder"
            )
        _check_disk(source, size)
        download(commit, missing)
        log.info("%s is in %s", source, folder)
    return folder


def _gguf_file(source: _Source, name: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    revision = source.revision
    if not isinstance(try_to_load_from_cache(source.repo, name, revision=revision), str):
        _check_disk(source, _size(source, [name], revision))
    return Path(hf_hub_download(source.repo, name, revision=revision, token=source.token))


def _size(source: _Source, names: Sequence[str], revision: str) -> int:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(token=source.token)
    found = api.get_paths_info(source.repo, list(names), revision=revision)
    sizes = {file.path: file.size for file in found if isinstance(file, RepoFile)}
    for name in names:
        if name not in sizes:
            raise _lacks(source, name, revision)
    return sum(sizes.values())


def _check_disk(source: _Source, size: int) -> None:
    cache = _cache()
    free = shutil.disk_usage(next(each for each in (cache, *cache.parents) if each.exists())).free
    if size > free:
        raise ConfigError(
            f"{source} needs {_gb(size)}, and {cache} has {_gb(free)} free; make room, or set "
            f"HF_HOME to a larger disk"
        )
    log.info("%s: downloading %s to %s", source, _gb(size), cache)


def _lacks(source: _Source, name: str, revision: str) -> ConfigError:
    from huggingface_hub import HfApi

    files = HfApi(token=source.token).list_repo_files(source.repo, revision=revision)
    hint = ""
    if gguf := next((file for file in files if file.endswith(".gguf")), None):
        hint = f"; it holds GGUF files, for example --model {source.repo}/{gguf}"
    elif any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        hint = (
            "; it holds pickled weights, which are programs and never loaded: convert them to "
            "safetensors"
        )
    return ConfigError(f"{source} on the Hub holds no {name}{hint}")


@contextmanager
def _readable_errors(source: _Source) -> Iterator[None]:
    from huggingface_hub import errors

    # The bases are the root of what any HTTP library raises; RuntimeError is Xet's.
    failures = cast(
        tuple[type[Exception], ...], (*errors.HfHubHTTPError.__bases__, OSError, RuntimeError)
    )
    try:
        yield
    except errors.GatedRepoError as why:
        raise ConfigError(
            f"{source} is gated; accept its terms on https://huggingface.co/{source.repo}, then "
            f"give a token of that account with --hf-token or in HF_TOKEN"
        ) from why
    except errors.RepositoryNotFoundError as why:
        raise ConfigError(
            f"there is no folder {source.repo!r} here and no such model on the Hub; if it is "
            "private, give a token with --hf-token or in HF_TOKEN"
        ) from why
    except errors.RevisionNotFoundError as why:
        raise ConfigError(f"{source.repo} on the Hub has no revision {source.revision!r}") from why
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as why:
        offline = isinstance(why, errors.OfflineModeIsEnabled) or isinstance(
            why.__cause__, errors.OfflineModeIsEnabled
        )
        reason = "HF_HUB_OFFLINE forbids to download it" if offline else "the Hub cannot be reached"
        raise DownloadFailed(
            f"{source} is not, or not wholly, in the cache {_cache()}, and {reason}"
        ) from why
    except errors.HFValidationError as why:
        raise ConfigError(
            f"model {source.repo!r} is neither a path that exists nor a Hub id: {why}"
        ) from why
    except failures as why:
        raise DownloadFailed(f"{source} cannot be downloaded: {_reason(why)}") from why


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


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


class PrefetchFailed(KvrelayError):
    """A file of a model is missing or damaged; another download may help."""


def prefetch(config: EngineConfig) -> dict[str, Any]:
    """Download a model and return its `path`, its size in `bytes` and its `files`.

    Raises ConfigError for a model that no node would serve, else DownloadFailed or PrefetchFailed.
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

    Raises ConfigError, and PrefetchFailed if one is missing or damaged.
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
    if tokenizer and path / "tokenizer.json" not in files:
        raise ConfigError(
            f"{path} holds no tokenizer.json; add one (transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
        )
    weights = [path / name for name in weight_files(path)]
    missing = [file.name for file in weights if not file.exists()]
    if missing:
        raise PrefetchFailed(f"{path} lacks {', '.join(missing)}; download it again")
    for file in weights:
        try:
            safe_open(file, framework="np")  # compares the header with the file's size
        except (SafetensorError, OSError) as why:
            raise _damaged(file, why) from why
    return files + weights


def _check_config(config: EngineConfig) -> None:
    read_model_config(config.model, config.load_format)


def _damaged(file: Path, why: Exception) -> PrefetchFailed:
    return PrefetchFailed(f"{file} is damaged ({why}); delete it and start again")
