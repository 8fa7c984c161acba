"""The common part of the plugins inside other engines, which imports none of them."""
