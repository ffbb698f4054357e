"""Models of a window plan: which files, by digest and size, and on the hosts of which role they must lie.

Rules: a model is its files' paths, sizes and digests, nothing else; its folder on a host carries the digest of that
list, so another version is another folder and nothing is ever changed in place. A command names it ``{model_NAME}``.
Not here: looking at hosts and sending files (``coordinator.staging_models``).
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from windows.document import Sha256, Strict, Text, canonical_bytes, sha256_hex, shaped
from windows.errors import FieldsError
from windows.site import Role

ModelName = Annotated[str, shaped(r"[a-z][a-z0-9_]{0,30}", "a model's name of a-z, 0-9 and '_', at most 31 long")]
RelativePath = Annotated[
    str,
    shaped(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*", "a relative path without '..'", 255),
]


class ModelFile(Strict):
    """One file of a model.

    Attributes:
        path: Below the model's folder, here and on the host.
    """

    path: RelativePath
    sha256: Sha256
    size_bytes: Annotated[int, Field(ge=0, le=1 << 44)]


class Model(Strict):
    """A model that programs of the plan read.

    Attributes:
        role: It is staged on every host of this role.
        source: Folder with its files on the coordinator's machine, below the plan file's or absolute. Read only for
            files that a host lacks.
        files: Every file, each path once.
    """

    name: ModelName
    role: Role
    source: Annotated[Text, Field(min_length=1, max_length=1024)]
    files: Annotated[tuple[ModelFile, ...], Field(min_length=1, max_length=4096)]

    @model_validator(mode="after")
    def _paths_are_files(self) -> Self:
        paths = [file.path for file in self.files]
        folders = {path.rsplit("/", depth)[0] for path in paths for depth in range(1, path.count("/") + 1)}
        if len(set(paths)) != len(paths) or folders & set(paths):
            raise FieldsError(("files",), f"in model {self.name!r} each path once, and none that is also a folder")
        return self

    @property
    def sha256(self) -> str:
        """Digest of the list of files; the order of the list does not matter."""
        files = sorted((file.model_dump() for file in self.files), key=lambda file: str(file["path"]))
        return sha256_hex(canonical_bytes({"files": files}))

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def placeholder(self) -> str:
        """What a command writes, in braces, for the model's folder on its host."""
        return f"model_{self.name}"

    def folder(self, work_dir: str) -> str:
        """Its folder on a host."""
        return f"{work_dir}/models/{self.sha256[:32]}"
