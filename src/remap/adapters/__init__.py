"""Adapters for engines that remap does not own. remap imports a module of this package only when it is asked for by
name.
"""
