"""The tables, in SQLAlchemy Core. Times are Unix seconds, JSON is text, states and reasons are their enum's value."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("group", Text, nullable=False),
    Column("task", Text, nullable=False),
    Column("split", Text, nullable=False),
    Column("step", Integer, nullable=False),
    Column("index", Integer, nullable=False),
    Column("seed", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("reward", Float),
    Column("reason", Text),
    Column("message", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Index("rollouts_by_state", "state", "reason"),
    Index("rollouts_by_group", "group"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("rollout_id", Text, ForeignKey("rollouts.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("sealed", Boolean, nullable=False),
    Column("process", Text, nullable=False),
    Column("outcome", Text),
    Column("exit_code", Integer),
    Column("reason", Text),
    Column("message", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    PrimaryKeyConstraint("rollout_id", "number"),
)

rewards = Table(
    "rewards",
    metadata,
    Column("rollout_id", Text, ForeignKey("rollouts.id"), primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("value", Float, nullable=False),
    Column("source", Text, nullable=False),
    Column("details", Text, nullable=False),
)

calls = Table(
    "calls",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False, unique=True),
    Column("rollout_id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("parent_id", Text, ForeignKey("calls.id")),
    Column("prefix_len", Integer, nullable=False),
    Column("suffix", LargeBinary, nullable=False),
    Column("sampled", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("versions", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("finish_reason", Text),
    Column("untrainable", Text),
    Column("label", Text, nullable=False),
    Column("dialect", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("fork", Text),
    Column("proposed_parent_id", Text),
    Column("fork_at", Integer),
    Column("requested", Text, nullable=False),
    Column("effective", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("finished_at", Float, nullable=False),
    Index("calls_by_attempt", "rollout_id", "attempt", "ordinal"),
    Index("calls_by_status", "status", "untrainable", "fork"),
)
"""`suffix`, `sampled` and `logprobs` as `canter.store.arrays` packs them."""

bodies = Table(
    "bodies",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("base", Integer),
    Column("request", LargeBinary, nullable=False),
    Column("reply", LargeBinary, nullable=False),
)
"""Apart from `calls`, so that reading many calls does not pass over their bodies. `base` is the `seq` of the call whose
bodies these are encoded against (`canter.store.bodies`)."""

keys = Table(
    "keys",
    metadata,
    Column("hash", LargeBinary, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("rollout_id", Text),
    Column("attempt", Integer),
    Column("revoked", Boolean, nullable=False),
    Index("keys_by_attempt", "rollout_id", "attempt"),
)

engines = Table(
    "engines",
    metadata,
    Column("url", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("seen_at", Float, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

facts = Table(
    "facts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("kind", Text, nullable=False),
    Column("rollout_id", Text),
    Column("attempt", Integer),
    Column("data", Text, nullable=False),
)
