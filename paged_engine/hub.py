"""From what stands behind --model to a place on disk: a path as it is, a Hugging Face Hub id
downloaded first.

The cache (HF_HOME), HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN, stored logins, progress bars and
repeated requests are huggingface_hub's. It throws an unfinished file away when its process ends,
though, so large files are brought into its cache from here, and go on where they were. Only
configs, tokenizers, safetensors and GGUF files are ever asked for: the pickles in .bin files are
programs. May run in any process, before anything heavy is imported.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import cast

from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError

__all__ = ["SMALL_FILES", "DownloadFailed", "resolve_model", "weight_files"]

log = logging.getLogger("kvrelay.engine")

PROGRESS_INTERVAL_S = 30.0
_AT_A_TIME = 4

_ID = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?P<file>/[^@]+\.gguf)?(?:@(?P<revision>[\w./-]+))?"
)
_INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    _INDEX,
)


class DownloadFailed(ConfigError):
    """The Hub could not be reached, or broke off: the same may work later."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class _Wanted:
    repo: str
    revision: str
    token: str | None

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def resolve_model(config: EngineConfig, check: Callable[[EngineConfig], None]) -> Path:
    """The folder or file of the model that an engine on this machine is to serve.

    It is a path, or on the Hub org/name, or org/name/file.gguf, each with @revision behind it if
    wanted (or in `revision`). An empty `hf_token` leaves it to HF_TOKEN and to stored logins. With
    load_format dummy only config and tokenizer of a repository are downloaded. `check` is asked
    with the folder of its small files before weights are, and raises ConfigError for a model that
    cannot be served as configured. Raises ConfigError saying what is wrong and what to do.
    """
    model, revision = config.model, config.revision
    found = _ID.fullmatch(model)
    try:
        path = Path(model).expanduser()
        there = path.exists()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as why:  # who may not look into its folder; no such user's home
        raise ConfigError(f"model {model[:200]!r} cannot be looked up: {why}") from why
    if there:
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
    behind_id = found["revision"] or ""
    if revision and behind_id and revision != behind_id:
        raise ConfigError(f"model {model!r} and revision {revision!r} name two revisions; give one")
    if found["file"] and config.load_format == "safetensors":
        raise ConfigError(
            f"load_format safetensors does not read the GGUF file {model!r}; gguf and auto do"
        )
    wanted = _Wanted(found["repo"], revision or behind_id or "main", config.hf_token or None)
    _quieten()
    with _told(wanted):
        return _file(wanted, found["file"][1:]) if found["file"] else _folder(wanted, config, check)


def _quieten() -> None:
    try:
        from huggingface_hub.utils import disable_progress_bars
    except ModuleNotFoundError as why:
        raise ConfigError(
            "a model on the Hub needs huggingface_hub, which is not installed here; pip install "
            "huggingface_hub, or "
            "pass a path"
        ) from why
    if not sys.stderr.isatty():
        disable_progress_bars()
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _folder(wanted: _Wanted, config: EngineConfig, check: Callable[[EngineConfig], None]) -> Path:
    from huggingface_hub import snapshot_download

    if config.load_format == "gguf":
        raise _not_one_file(wanted)
    allowed = list(SMALL_FILES)
    folder = Path(
        snapshot_download(
            wanted.repo, revision=wanted.revision, token=wanted.token, allow_patterns=allowed
        )
    )
    if not (folder / "config.json").exists():
        raise _absent(wanted, "config.json", folder.name)
    if config.load_format == "dummy":
        return folder
    missing = [name for name in weight_files(folder) if not (folder / name).exists()]
    if missing:
        # The commit and not the branch: it may move meanwhile.
        files = [_large_file(wanted, name, folder.name) for name in missing]
        _check_before_download(wanted, replace(config, model=str(folder)), check)
        _bring(wanted, files)
        snapshot_download(
            wanted.repo, revision=folder.name, token=wanted.token, allow_patterns=missing
        )
        log.info("%s is in %s", wanted, folder)
    return folder


def weight_files(folder: Path) -> list[str]:
    """The safetensors that make up a model: those of its index, for a repository may hold others
    too.
    """
    index = folder / _INDEX
    if not index.exists():
        return ["model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as why:
        raise ConfigError(f"{index} is not a readable safetensors index: {why!r}") from why
    if not all(isinstance(name, str) and name.endswith(".safetensors") for name in names):
        raise ConfigError(
            f"{index} names files that are no safetensors: {', '.join(map(str, names[:3]))}"
        )
    return names


def _check_before_download(
    wanted: _Wanted, config: EngineConfig, check: Callable[[EngineConfig], None]
) -> None:
    check(config)
    if not Path(config.model, "tokenizer.json").exists():
        raise ConfigError(
            f"{wanted} on the Hub holds no tokenizer.json; download it, add one (transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it) and pass the folder"
        )


def _file(wanted: _Wanted, name: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(wanted.repo, name, revision=wanted.revision), str):
        _bring(wanted, [_large_file(wanted, name, wanted.revision)])
    return Path(hf_hub_download(wanted.repo, name, revision=wanted.revision, token=wanted.token))


@dataclass(frozen=True, slots=True)
class _LargeFile:
    name: str
    url: str
    etag: str
    size: int
    blob: Path

    @property
    def part(self) -> Path:
        return self.blob.with_name(f"{self.etag}.part")

    @property
    def bytes_left(self) -> int:
        try:
            return self.size - self.part.stat().st_size
        except FileNotFoundError:
            return 0 if self.blob.exists() else self.size


def _large_file(wanted: _Wanted, name: str, revision: str) -> _LargeFile:
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(wanted.repo, name, revision=revision)
    try:
        found = get_hf_file_metadata(url, token=wanted.token)
    except errors.EntryNotFoundError as why:
        raise _absent(wanted, name, revision) from why
    if found.size is None or not re.fullmatch(r"[\w-]+", found.etag or ""):
        raise OSError(
            f"the server does not say what {name} is: ETag {found.etag!r}, {found.size} bytes"
        )
    assert found.etag is not None
    blobs = _cache() / f"models--{wanted.repo.replace('/', '--')}" / "blobs"
    return _LargeFile(name, url, found.etag, found.size, blobs / found.etag)


def _bring(wanted: _Wanted, files: Sequence[_LargeFile]) -> None:
    total, cache = sum(file.bytes_left for file in files), _cache()
    free = shutil.disk_usage(next(each for each in (cache, *cache.parents) if each.exists())).free
    if total > free:
        raise ConfigError(
            f"{wanted} needs {_gb(total)}, and {cache} has {_gb(free)} free; make room, or set "
            f"HF_HOME to a larger disk"
        )
    if total:
        log.info("%s: downloading %s to %s", wanted, _gb(total), cache)
    waiting: SimpleQueue[_LargeFile] = SimpleQueue()
    failures: list[Exception] = []
    for file in files:
        waiting.put(file)

    def work() -> None:
        try:
            while not failures:
                _fetch(wanted, waiting.get_nowait())
        except Empty:
            return
        except Exception as why:  # noqa: BLE001 - whatever it is, the thread that waits raises it
            failures.append(why)

    # Daemons, so that Ctrl-C ends the process at once.
    threads = [
        threading.Thread(target=work, daemon=True) for _ in range(min(_AT_A_TIME, len(files)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(PROGRESS_INTERVAL_S)
            left = sum(file.bytes_left for file in files)
            if left and not sys.stderr.isatty():
                log.info("%s: %s of %s are still to come", wanted, _gb(left), _gb(total))
    if failures:
        raise failures[0]


def _fetch(wanted: _Wanted, file: _LargeFile) -> None:
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    if file.size > MAX_HTTP_DOWNLOAD_SIZE:
        return  # the Hub gives it over Xet alone, which is the library's
    # The library's own lock for this content.
    lock = _cache() / ".locks" / file.blob.parent.parent.name / f"{file.etag}.lock"
    for folder in (lock.parent, file.blob.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if file.blob.exists():
            return  # another process was faster
        with file.part.open("ab") as part:
            begins_at = part.tell()
            http_get(
                file.url,
                part,
                resume_size=begins_at,
                headers=build_hf_headers(token=wanted.token),
                expected_size=file.size,
                displayed_filename=file.name,
            )
        if begins_at and len(file.etag) == 64:
            with file.part.open("rb") as whole:
                found = hashlib.file_digest(whole, "sha256").hexdigest()
            if found != file.etag:
                # As after a power failure: the file system had the length but not yet the bytes.
                file.part.unlink()
                raise OSError(f"what was there of {file.name} was damaged, and is deleted")
        file.part.replace(file.blob)


def _listed(wanted: _Wanted, revision: str) -> tuple[list[str], str]:
    from huggingface_hub import HfApi

    files = HfApi(token=wanted.token).list_repo_files(wanted.repo, revision=revision)
    gguf = next((file for file in files if file.endswith(".gguf")), None)
    return files, f"--model {wanted.repo}/{gguf}" if gguf else ""


def _not_one_file(wanted: _Wanted) -> ConfigError:
    _, example = _listed(wanted, wanted.revision)
    if not example:
        return ConfigError(
            f"load_format gguf does not fit {wanted}, which holds no GGUF file; leave load_format "
            f"out"
        )
    return ConfigError(
        f"load_format gguf reads one file, and {wanted} is a repository; name a file of it, for "
        f"example {example}"
    )


def _absent(wanted: _Wanted, name: str, revision: str) -> ConfigError:
    files, example = _listed(wanted, revision)
    hint = ""
    if example:
        hint = f"; it holds GGUF files, for example {example}"
    elif any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        hint = (
            "; it holds pickled weights, which are programs and never loaded: convert them to "
            "safetensors"
        )
    return ConfigError(f"{wanted} on the Hub holds no {name}{hint}")


@contextmanager
def _told(wanted: _Wanted) -> Iterator[None]:
    from huggingface_hub import errors

    # The bases are the root of what the Hub's HTTP library raises, whichever of several that is.
    # RuntimeError is Xet's.
    failures = cast(
        tuple[type[Exception], ...], (*errors.HfHubHTTPError.__bases__, OSError, RuntimeError)
    )
    try:
        yield
    except errors.GatedRepoError as why:
        raise ConfigError(
            f"{wanted} is gated; accept its terms on https://huggingface.co/{wanted.repo}, then "
            f"give a token of that "
            "account with --hf-token or in HF_TOKEN"
        ) from why
    except errors.RepositoryNotFoundError as why:
        raise ConfigError(
            f"there is no folder {wanted.repo!r} here and no such model on the Hub; if it is "
            f"private, give a token "
            "with --hf-token or in HF_TOKEN"
        ) from why
    except errors.RevisionNotFoundError as why:
        raise ConfigError(f"{wanted.repo} on the Hub has no revision {wanted.revision!r}") from why
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as why:
        offline = isinstance(why, errors.OfflineModeIsEnabled) or isinstance(
            why.__cause__, errors.OfflineModeIsEnabled
        )
        reason = "HF_HUB_OFFLINE forbids to download it" if offline else "the Hub cannot be reached"
        raise DownloadFailed(
            f"{wanted} is not, or not wholly, in the cache {_cache()}, and {reason}"
        ) from why
    except errors.HFValidationError as why:
        raise ConfigError(
            f"model {wanted.repo!r} is neither a path that exists nor a Hub id: {why}"
        ) from why
    except failures as why:
        raise DownloadFailed(f"{wanted} cannot be downloaded: {_reason(why)}") from why


def _reason(why: BaseException) -> str:
    if isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {_cache()} is full; make room, or set HF_HOME to a larger one"
    if getattr(getattr(why, "response", None), "status_code", None) in (401, 403):
        return "the Hub does not accept the token from --hf-token, HF_TOKEN or a stored login"
    text = " ".join(str(why).split()) or type(why).__name__
    return f"{text}; start again, and it goes on from where it was"


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
