"""The generated parts of docs/: tables made of the code that they are about, so that they cannot be
out of date.

Owns what stands in a page between `<!-- generated: NAME -->` and `<!-- end -->`; the words around
are the page's own. `python -m scripts.reference` fills the pages in, with --check it says which of
them are not current. Reads the config types, the command line, the OpenAPI document, the metric
registries and the error tree.
"""
