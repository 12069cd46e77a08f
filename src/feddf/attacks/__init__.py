"""Hostile clients, to measure defences with: the section ``[attack]`` of a configuration.

An attack by name is a function ``(config, scene)`` that returns an :class:`~feddf.attacks.hostile.Attack`;
:data:`feddf.config.names.ATTACKS` lists them. Nothing here is used by a run that is not attacked.
"""
