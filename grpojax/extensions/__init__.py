"""Extensions that come with grpojax, a folder for each. The core imports none of them (`grpojax.extension`)."""
