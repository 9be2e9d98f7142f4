"""CURVE keys of one worker, and the peers it trusts.

A key directory holds::

    kvxfer.key      the secret key, readable by its owner only
    kvxfer.pub      the public key: copy it to the peers, under a name of its own
    authorised      the peers' public keys, one a line, or a directory of such files (``*.pub``)

A line of ``authorised`` is a public key and, after blanks, the hosts (``host`` or ``host:port``) where prefill servers
with this key are dialled. Hosts are needed only where several keys are authorised. ``#`` begins a comment.
"""

from __future__ import annotations

import itertools
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvxfer.errors import ConfigurationError, InsecureEndpoint
from kvxfer.hosts import Address

SECRET_FILE = "kvxfer.key"
PUBLIC_FILE = "kvxfer.pub"
AUTHORISED = "authorised"
_KEY_CHARS = 40
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair and the public keys that may talk to it. Immutable, thread-safe.

    Attributes:
        public: our public key, 40 bytes of Z85 text.
        secret: our secret key, 40 bytes of Z85 text; never shown in ``repr``.
        authorised: public keys of the peers, in both directions.
        servers: ``host`` or ``host:port`` -> public key of the prefill that answers there.
    """

    public: bytes
    secret: bytes = field(repr=False)
    authorised: frozenset[bytes] = frozenset()
    servers: Mapping[str, bytes] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for key in (self.public, self.secret, *self.authorised, *self.servers.values()):
            _check_key(key, "a key")

    @classmethod
    def generate(cls, authorised: Iterable[bytes] = ()) -> Keys:
        """A fresh pair that trusts ``authorised``."""
        public, secret = zmq.curve_keypair()
        return cls(public, secret, frozenset(authorised))

    def trusting(self, *peers: bytes, at: Iterable[str] = ()) -> Keys:
        """The same pair, trusting further public keys; with ``at``, one peer and the hosts where it is dialled."""
        places = tuple(at)
        if places and len(peers) != 1:
            raise ConfigurationError("hosts belong to one key; call trusting() once for each")
        servers = {**self.servers, **dict.fromkeys(places, peers[0])}
        return Keys(self.public, self.secret, self.authorised | set(peers), servers)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Keys:
        """Reads a key directory.

        Raises:
            ConfigurationError: a file is missing or is not what it should be.
            InsecureEndpoint: others than its owner may read the secret key.
        """
        folder = Path(directory)
        secret = _read_key(folder / SECRET_FILE, private=True)
        try:
            public = zmq.curve_public(secret)
        except ValueError as cause:
            raise ConfigurationError("the secret key is not a CURVE key", path=str(folder / SECRET_FILE)) from cause
        authorised, servers = _read_authorised(folder / AUTHORISED)
        return cls(public, secret, frozenset(authorised), servers)

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[Path, Path]:
        """Writes the pair; returns the paths of the secret and the public file. Does not touch ``authorised``.

        Raises ConfigurationError where a key exists already and ``overwrite`` is not set.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret_path, public_path = folder / SECRET_FILE, folder / PUBLIC_FILE
        if overwrite:
            secret_path.unlink(missing_ok=True)
        try:
            descriptor = os.open(
                secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except FileExistsError as cause:
            raise ConfigurationError(
                "there is a key already; choose another directory or ask to overwrite it", path=str(secret_path)
            ) from cause
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(self.secret + b"\n")
        public_path.write_bytes(self.public + b"\n")
        return secret_path, public_path

    def server_key(self, address: Address) -> bytes:
        """The public key that the server at ``address`` must prove.

        Raises ConfigurationError where several peers are authorised and none is named for this address.
        """
        for place in (f"{address.host}:{address.port}", address.host, address.path):
            if place and place in self.servers:
                return self.servers[place]
        if len(self.authorised) == 1:
            return next(iter(self.authorised))
        raise ConfigurationError(
            "which key does this server have? Authorise exactly one key, or write the host behind its key",
            address=str(address),
            authorised=len(self.authorised),
        )


def _check_key(key: bytes, what: str) -> bytes:
    if len(key) == _KEY_CHARS:
        try:
            if len(z85.decode(key)) == 32:
                return key
        except (ValueError, KeyError, struct.error):
            pass
    raise ConfigurationError(f"{what} is not 40 characters of Z85 text, as `kvxfer keygen` writes them")


def _read(path: Path, *, private: bool) -> str:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if private and (status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0)):
                raise InsecureEndpoint(
                    "others than its owner may read the secret key; run chmod 600 on it",
                    path=str(path),
                    mode=f"{stat.S_IMODE(status.st_mode):04o}",
                )
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as cause:
        raise ConfigurationError(f"cannot read the key file: {cause.strerror}", path=str(path)) from cause
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigurationError("the key file is too long", path=str(path))
    return data.decode("ascii", "replace")


def _lines(text: str) -> list[list[str]]:
    """The words of each line, without comments. No Z85 key begins with ``#``: its first block would exceed 32 bits."""
    lines = []
    for line in text.splitlines():
        words = list(itertools.takewhile(lambda word: not word.startswith("#"), line.split()))
        if words:
            lines.append(words)
    return lines


def _read_key(path: Path, *, private: bool) -> bytes:
    lines = _lines(_read(path, private=private))
    if len(lines) != 1 or len(lines[0]) != 1:
        raise ConfigurationError("the key file must hold one key on one line", path=str(path))
    return _check_key(lines[0][0].encode(), f"the key in {path}")


def _read_authorised(path: Path) -> tuple[set[bytes], dict[str, bytes]]:
    if not path.exists():
        return set(), {}
    files = sorted(path.glob("*.pub")) if path.is_dir() else [path]
    authorised: set[bytes] = set()
    servers: dict[str, bytes] = {}
    for file in files:
        for key_text, *places in _lines(_read(file, private=False)):
            key = _check_key(key_text.encode(), f"a key in {file}")
            authorised.add(key)
            servers.update(dict.fromkeys(places, key))
    return authorised, servers
