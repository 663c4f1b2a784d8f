"""Where a run's checkpoints can be: what is known by the URL alone, before anything is asked or waited for.

Client libraries know many more schemes, and only find out at the first request that one is read-only, lacks options, or is
not to be reached: after minutes of retries, made for stores that come back. Worst is the memory of a process (`memory://`):
every process has one of its own, so that a run there waits for ever for what another process has written.
"""

from __future__ import annotations

S3 = ("s3", "s3a")
CLOUDS = ("gs", "gcs", "az", "abfs")
SUPPORTED = "a folder, " + ", ".join(f"{scheme}://" for scheme in ("file", *S3, *CLOUDS)) + ", or another store of fsspec's"
"""In words, for whoever gave another one."""

UNFIT = {
    "memory": "each process has such a memory of its own, and no other sees what is there",
    **dict.fromkeys(("http", "https", "github", "git", "gist", "data"), "it can only be read"),
    "ftp": "nobody can create a file there that surely was not there before",
    **dict.fromkeys(
        ("zip", "tar", "libarchive", "reference", "dir", "cached", "blockcache", "filecache", "simplecache", "generic"),
        "it is a view of another place",
    ),
}


def is_local(url: str) -> bool:
    """Whether a place is a folder of this machine."""
    return "://" not in url or url.startswith("file://")


def why_not(url: str) -> str:
    """Why nothing of a run can be at `url`, in words that follow the URL; empty: nothing speaks against its scheme."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() in (*S3, *CLOUDS, *UNFIT, "file") and not rest.startswith("//"):
        meant = rest if scheme.lower() == "file" else rest.lstrip("/")
        return f"without :// it is a folder named {scheme}:, so write {scheme.lower()}://{meant}"
    if is_local(url) or scheme in S3 + CLOUDS:
        return ""
    return UNFIT.get(scheme) or ("" if scheme in _known() else f"{scheme}:// is not known to fsspec")


def _known() -> list[str]:
    """Schemes that fsspec has, plugins among them; it is imported only for one that is none of ours."""
    import fsspec

    return list(fsspec.available_protocols())


def checked(url: str) -> str:
    """The URL itself; ValueError if nothing of a run can be there."""
    if why := why_not(url):
        raise ValueError(f"{url}: {why}; give {SUPPORTED}")
    return url
