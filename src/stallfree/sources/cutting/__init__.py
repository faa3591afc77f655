"""`cut`: data sets split at their own attributes that hold a transform."""
