"""Planning policies over recorded links with a virtual clock, beside an oracle's bound."""
