"""`kdn bench blend`: pieces learned apart and joined, held against one reading of everything."""
