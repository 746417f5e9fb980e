"""Messages to token ids and back, exactly: a message match proposes a parent, the token prefix decides.

`messages` has the canonical message, `tokenizer` ids and chat templates, `rendering` turns conversations into ids
(`families` with the library `renderers`, `template` for any chat template), `parsing` sampled ids into a message,
`tree` holds the calls of one attempt, `causes` says why a call forks.
"""
