def read(source, options):
    raise NotImplementedError
