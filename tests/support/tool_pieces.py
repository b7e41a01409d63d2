"""Pieces of a tool parser's output, compared whatever the cuts of the text."""

from __future__ import annotations

from router.tools.output import CallArguments, CallStart, Piece, PieceCollector


def join(pieces: list[Piece]) -> list[Piece]:
    """Return pieces with neighbours of one kind joined, which removes the traces of cuts."""
    collector = PieceCollector()
    for piece in pieces:
        match piece:
            case str():
                collector.text(piece)
            case CallStart():
                collector.start(piece.name)
            case CallArguments():
                collector.arguments(piece.text)
    return collector.take()
