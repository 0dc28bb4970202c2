"""Operations that refuse operands of different dtypes, and the silent relatives of that failure."""
