from ucm_ray.cli import main

main()
