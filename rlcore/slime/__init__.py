"""slime's command line, understood: what its arguments are here.

`table` says for every argument what becomes of it, `translate` turns a launch line into a
configuration. Nothing is ignored: an argument becomes a setting, or asks for what is so anyway (and
that is said), or is refused with the reason and the nearest thing.
"""
