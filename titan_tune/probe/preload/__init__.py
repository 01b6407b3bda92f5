"""Probes without the imports: a process that has imported torch and torchtitan forks each probe's ranks.

``search → zygote → supervisor → ranks``. The zygote (``zygote``) imports once and never touches a GPU. For
each probe it forks a supervisor, which is the probe's warden and torchrun's agent in one (``supervisor``)
and forks a process per rank. ``launcher`` is the search's side of it.
``docs/decisions/0008-preloaded-launcher.md`` says why this equals a start by torchrun.
"""
