"""A topology file takes the place of what was discovered."""

from __future__ import annotations

from pathlib import Path

import yaml

from services.store.transfer.topology.discovery import SYSFS, discover
from services.store.transfer.topology.matrix import Matrix
from shared.errors import ConfigError


def read_topology(path: str, sysfs: Path = SYSFS) -> Matrix:
    """The matrix in the file ``path`` (YAML or JSON, the paper's form), else as discovered where ``path`` is empty.
    A file may leave NICs out: they are not used then. Blocking. Raises ConfigError."""
    found = discover(sysfs)
    return load(path, found.nics) if path else found


def load(path: str, known: tuple[str, ...]) -> Matrix:
    """``known``: the NICs of this server. Raises ConfigError that names file, field and what is wrong."""
    source = f"topology file {path}"
    try:
        document = yaml.load(Path(path).read_bytes(), _Loader)
    except OSError as e:
        raise ConfigError(f"{source}: cannot be read: {e.strerror}", field="topology_file") from e
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(f"{source}: is neither YAML nor JSON: {e}", field="topology_file") from e
    return Matrix.parse(document, source=source, known=known)


class _Loader(yaml.SafeLoader):
    """Refuses a location that is named twice: YAML's last one would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)
