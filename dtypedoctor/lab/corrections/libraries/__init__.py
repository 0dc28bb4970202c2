"""Corrections of released libraries, a module for each library, which nobody imports by name.

A correction here is edits of the library's own source, checked before they are made: :mod:`dtypedoctor.source_edits`. Beside the
module lies the test that the library would want with the correction.
"""
