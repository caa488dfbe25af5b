"""Plugins for other libraries; each file imports its library, and nothing imports this folder."""
