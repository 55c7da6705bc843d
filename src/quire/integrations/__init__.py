"""Quire in the engines that users run already: each subpackage connects one engine through its own extension points."""
