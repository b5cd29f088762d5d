"""Leaves out of a decoded message what this version does not know.

The daemon may be of a newer version than an agent that has a job (see the FAQ, "How do I upgrade").
Only that direction is tolerated: the daemon refuses messages with unknown fields.

Fixed-length tuples, keys and types with metadata are not searched: no message has a struct in one.
"""

from __future__ import annotations

from typing import Any

from msgspec import inspect


def known_fields(data: Any, kind: inspect.Type) -> Any:
    """Return ``data`` without the fields of structs that ``kind`` does not have.

    Args:
        data: a message, or a part of one, as msgpack decodes it without a type.
        kind: its type. Where ``data`` does not have this type, it is returned unchanged.
    """
    if isinstance(kind, inspect.UnionType):
        kind = _of_union(data, kind)
    if isinstance(kind, inspect.StructType) and isinstance(data, dict):
        types = {field.encode_name: field.type for field in kind.fields}
        return {
            name: known_fields(value, types[name]) if name in types else value
            for name, value in data.items()
            if name in types or name == kind.tag_field
        }
    if isinstance(kind, inspect.StructType) and isinstance(data, list):
        fields = zip(data, kind.fields, strict=False)  # array_like: fields are in order
        return [known_fields(value, field.type) for value, field in fields]
    if isinstance(kind, inspect.DictType) and isinstance(data, dict):
        return {name: known_fields(value, kind.value_type) for name, value in data.items()}
    if isinstance(kind, inspect.ListType | inspect.VarTupleType) and isinstance(data, list):
        return [known_fields(value, kind.item_type) for value in data]
    return data


def _of_union(data: Any, union: inspect.UnionType) -> inspect.Type:
    """Return the member of a union to which ``data`` belongs; the union itself if it belongs to
    none that has fields.
    """
    for kind in union.types:
        if isinstance(kind, inspect.StructType) and kind.tag is not None:
            fits = isinstance(data, dict) and data.get(kind.tag_field or "") == kind.tag
        elif isinstance(kind, inspect.StructType):
            fits = isinstance(data, list if kind.array_like else dict)
        elif isinstance(kind, inspect.DictType):
            fits = isinstance(data, dict)
        else:
            fits = isinstance(kind, inspect.ListType | inspect.VarTupleType) and isinstance(
                data, list
            )
        if fits:
            return kind
    return union
