"""Plugins written for slime, as they are: its import names and its `args`, in place of slime.

`state` switches this on in a process and off again, `imports` answers `import slime...`,
`attributes` makes slime's `args` of our settings, and `provided` holds what the names stand for.

Invariants:
- It is on only in processes that load plugins, and only where the run says `compat.slime = true`.
- While it is on, `slime` is ours even where a real slime is installed; once off, it is that again.
- A name that does not exist here is an error that says so; nothing is a stand-in that does nothing.
"""
