"""Messages to token ids and back, exactly: a message match proposes a parent, the token prefix decides.

`messages` has the canonical message, `tokenizer` ids and chat templates, `rendering` how a model's conversations become ids
(`families` with the library `renderers`, `template` for any chat template), `parsing` how sampled ids become a message,
`tree` the calls of one attempt, `causes` why a call forks.
"""
