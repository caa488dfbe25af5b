"""Cuts of the own kernel that between them take every path of its source."""

from __future__ import annotations

from fp8kit.matmul.swap_ab import Tile

CUTS = [
    Tile(16, 1, 4, 24, 4, 6, 1, 1),
    Tile(8, 1, 1, 12, 4, 3, 1, 3),
    Tile(8, 2, 4, 9, 4, 2, 4, 1),
    Tile(16, 3, 2, 6, 4, 6, 2, 1),
    Tile(16, 1, 4, 20, 4, 5, 3, 1),
    Tile(48, 2, 1, 5, 4, 3, 3, 1),
    Tile(64, 1, 4, 10, 4, 6, 4, 1),
    Tile(80, 2, 2, 5, 5, 5, 1, 1),
    Tile(112, 3, 1, 3, 3, 3, 2, 1),
    Tile(128, 1, 2, 6, 6, 6, 4, 1),
    Tile(128, 2, 4, 4, 4, 4, 3, 1),
    Tile(128, 2, 8, 6, 6, 6, 1, 1),
    Tile(128, 3, 1, 4, 4, 4, 1, 1),
    Tile(96, 2, 4, 10, 4, 10, 1, 1),
    Tile(128, 2, 4, 8, 4, 8, 1, 1),
    Tile(128, 2, 4, 6, 4, 6, 2, 1),
    Tile(64, 1, 1, 3, 3, 3, 2, 3),
    Tile(128, 1, 4, 6, 6, 6, 3, 1, True),
    Tile(128, 2, 4, 6, 6, 6, 1, 1, True),
    Tile(128, 3, 1, 3, 3, 3, 2, 1, True),
    Tile(80, 2, 4, 7, 7, 7, 1, 1, True),
    Tile(96, 1, 4, 9, 9, 9, 3, 1, True),
    Tile(112, 2, 4, 6, 6, 6, 1, 1, True),
    Tile(96, 3, 1, 5, 5, 5, 1, 1, True),
    Tile(80, 3, 1, 4, 4, 4, 2, 1, True),
    Tile(128, 3, 1, 4, 4, 4, 1, 1, True),
    Tile(128, 1, 4, 8, 4, 6, 1, 1, True),
    Tile(128, 1, 4, 7, 4, 6, 2, 1, True),
    Tile(80, 1, 4, 12, 4, 6, 1, 1, True),
    Tile(80, 1, 4, 16, 4, 6, 2, 1, True),
    Tile(144, 2, 1, 6, 6, 6, 1, 1, True),
    Tile(160, 2, 1, 5, 5, 5, 1, 1, True),
    Tile(128, 2, 8, 6, 6, 6, 1, 1, True),
    Tile(112, 2, 8, 6, 6, 6, 1, 1),
    Tile(112, 2, 4, 6, 4, 6, 1, 1),
]
