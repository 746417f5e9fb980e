"""Runs rollouts: the harness of every attempt, then its grader, each as a process of its own.

`reconcile` decides (pure), `loop` acts; `runner` makes folders and environments; `spawner` talks to `launcher`, the
warmed parent from which `keeper` processes are forked, one for every harness or grader.
"""
