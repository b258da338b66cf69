def pattern_rows(): yield from ()
length_rows = selected_rows = indexer_rows = layer_rows = decode_rows = pattern_rows
