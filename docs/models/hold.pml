/* Leases, epochs, restore debt, dead-man, reboot and recovery of a HOLD, as the guards of two hosts enforce them.

   Checked exhaustively by scripts/check_models.sh:
     - no two holders act on a host, and none acts on a lease that is no longer its own;
     - production is never down without debt on the host's disk, and in every final state it is up again, or the
       host is in debt and DEGRADED, which a person sees;
     - nobody closes, or restores, a hold that is not the one it names (id and epoch);
     - one restore at a time per host, never onto a device that an owned run still uses.

   What is modelled: two competing coordinators that may crash between any two steps, a recoverer of a crashed hold,
   one dead-man per host that may fire at any moment after arming (it is the boot-restore unit as well), lease expiry
   before arming, and FAULTS faults of any kind at any moment. Interleaving covers suspended coordinators and late
   packets: every verb is checked on the host at the moment it takes effect.

   What is not: time as numbers, disks that fill up, restart of a dead-man that dies (the service manager's job, or the
   holder's; tested on real hosts), the measurement itself. -DMUTANT_x removes one rule; the script demands that each mutant fails. */

#ifndef NH
#define NH 2
#endif
#ifndef COORDINATORS
#define COORDINATORS 2
#endif
#define UP 1
#define DOWN 0

byte epoch[NH];          /* fence epoch; only ever grows */
byte holder[NH];         /* hold id of the open record, 0 for none */
bool voided[NH];         /* the record is of an earlier boot */
bool prod[NH];           /* production */
bool armed[NH];          /* dead-man and boot-restore unit enabled, on disk */
bool debt[NH];           /* restore debt, on disk */
bool tried[NH];          /* the dead-man had its one shot at this debt */
bool degraded[NH];       /* restore tried and not proven: shown by status, exit code 50 */
byte acting[NH];         /* hold id whose owned run uses the devices, 0 for none */
bool locked[NH];         /* the host lock of mutating verbs */
byte restorers[NH];      /* how many restores are in progress */
byte boots[NH];          /* boot id */
byte claim[3 * NH];      /* [NH * hold + host]: epoch that the host gave that hold, 0 for none */
bool crashed[3];         /* hold's coordinator is gone and did not close */

/* How many faults may still happen, of any kind: a guard process killed in the middle of a verb, a lease broken by a
   person, a restore whose proof fails, a power cycle. Crashes of coordinators and expiries are not counted. */
#ifndef FAULTS
#define FAULTS 3
#endif
byte faults_left = FAULTS;

#define MINE(k, h)    (holder[h] == (k) && epoch[h] == claim[NH * (k) + (h)])
#ifdef MUTANT_NO_EPOCH
#define ACCEPTED(k, h) (holder[h] != 0)
#else
#define ACCEPTED(k, h) MINE(k, h)
#endif
#ifdef MUTANT_RESUME_AFTER_REBOOT
#define MAY_ACT(k, h) (ACCEPTED(k, h))
#else
#define MAY_ACT(k, h) (ACCEPTED(k, h) && !voided[h])
#endif
#ifdef MUTANT_GRANT_IN_DEBT
#define MAY_GRANT(h)  (holder[h] == 0)
#else
#define MAY_GRANT(h)  (holder[h] == 0 && !debt[h] && !armed[h])
#endif
#ifdef MUTANT_CLOSE_WITHOUT_PROOF
#define MAY_CLOSE(k, h) (ACCEPTED(k, h))
#else
#define MAY_CLOSE(k, h) (ACCEPTED(k, h) && !debt[h] && !armed[h])
#endif

/* Production is never down without something on the host's disk that will bring it back. */
#define INVARIANT(h) assert(prod[h] == UP || debt[h] || armed[h])

#ifdef MUTANT_NO_LOCK
#define LOCK_FREE(h) true
#else
#define LOCK_FREE(h) (!locked[h])
#endif

/* The one idempotent restore: close, recover, dead-man and boot unit all run this. `mine` says whether the caller
   must show a claim; the dead-man needs none, it is the host itself. A reboot or a kill ends it anywhere. */
inline restore(h, k, must_claim) {
  atomic {
    LOCK_FREE(h);
    if
    :: must_claim && !ACCEPTED(k, h) -> goto restore_over
    :: else
    fi;
    assert(!must_claim || MINE(k, h));
    locked[h] = true; restorers[h]++; my_boot = boots[h];
    assert(restorers[h] == 1);
#ifdef MUTANT_DISARM_FIRST
    if
    :: must_claim -> armed[h] = false
    :: else
    fi
#endif
  }
  atomic {
    if
    :: boots[h] != my_boot -> goto restore_over
    :: else
    fi;
    if
    :: true
    :: must_claim && faults_left > 0 -> faults_left--; locked[h] = false; restorers[h]--; goto restore_over
    fi;
#ifndef MUTANT_RUNS_SURVIVE
    acting[h] = 0;
#endif
  }
  atomic {
    if
    :: boots[h] != my_boot -> goto restore_over
    :: else
    fi;
    if
    :: faults_left > 0 && armed[h] -> faults_left--; degraded[h] = true; debt[h] = true;
       locked[h] = false; restorers[h]--; goto restore_over
    :: true
    fi;
    assert(acting[h] == 0);
    prod[h] = UP;
  }
  atomic {
    if
    :: boots[h] != my_boot -> goto restore_over
    :: else
    fi;
    /* The proof, then the disarming, as state writes under the same lock. */
    debt[h] = false; armed[h] = false; degraded[h] = false; tried[h] = false;
    locked[h] = false; restorers[h]--;
    if
    :: !must_claim -> holder[h] = 0
    :: else
    fi
  }
restore_over: skip;
}

#define MAY_CRASH if :: true :: crashed[k] = true; goto gone fi

inline close_hold(h, k) {
  atomic {
    if
    :: MAY_CLOSE(k, h) && !locked[h] -> assert(MINE(k, h)); assert(!debt[h] && prod[h] == UP); holder[h] = 0
    :: else
    fi
  }
}

inline acquire(h, k) {
  atomic {
    if
    :: MAY_GRANT(h) && !locked[h] ->
       assert(acting[h] == 0); assert(prod[h] == UP);
       epoch[h]++; holder[h] = k; claim[NH * k + h] = epoch[h]; voided[h] = false
    :: else -> goto back
    fi
  }
}

inline arm(h, k) {
  atomic {
    if
    :: MAY_ACT(k, h) && !locked[h] -> assert(MINE(k, h)); armed[h] = true
    :: else -> goto back
    fi
  }
}

/* Debt is written before the first stop; both under the host lock, so that a restore waits. */
inline stop(h, k) {
  atomic {
    LOCK_FREE(h);
    if
#ifdef MUTANT_STOP_UNARMED
    :: MAY_ACT(k, h) -> skip
#else
    :: MAY_ACT(k, h) && armed[h] -> skip
#endif
    :: else -> goto back
    fi;
    assert(MINE(k, h));
    locked[h] = true; my_boot = boots[h];
    debt[h] = true
  }
  atomic {
    if
    :: boots[h] != my_boot -> goto back
    :: else
    fi;
    if
    :: faults_left > 0 -> faults_left--; locked[h] = false; goto back
    :: true
    fi;
    prod[h] = DOWN; INVARIANT(h)
#ifdef MUTANT_DEBT_LOST_ON_DISK
    ; debt[h] = false
#endif
    ; locked[h] = false
  }
}

inline start_run(h, k) {
  atomic {
    if
    :: MAY_ACT(k, h) && prod[h] == DOWN && !locked[h] ->
       assert(MINE(k, h)); assert(!voided[h]); assert(acting[h] == 0 || acting[h] == k); acting[h] = k
    :: else -> goto back
    fi
  }
}

proctype Coordinator(byte k) {
  byte my_boot; byte h;
  h = 0;
  do :: h < NH -> acquire(h, k); MAY_CRASH; h++ :: else -> break od;
#ifndef MUTANT_STOP_UNARMED
  h = 0;
  do :: h < NH -> arm(h, k); MAY_CRASH; h++ :: else -> break od;
#endif
  h = 0;
  do :: h < NH -> stop(h, k); MAY_CRASH; h++ :: else -> break od;
  h = 0;
  do :: h < NH -> start_run(h, k); MAY_CRASH; h++ :: else -> break od;
back:
  /* Whatever happened: back, on each host whose claim still holds. Owned runs are ended by the restore. */
  h = 0;
  do :: h < NH -> restore(h, k, true); MAY_CRASH; close_hold(h, k); MAY_CRASH; h++ :: else -> break od;
gone: skip
}

/* Any machine may close a crashed hold: exactly that one, by its id and epoch. */
proctype Recoverer(byte k) {
  byte my_boot; byte h;
end: crashed[k];
  h = 0;
  do :: h < NH -> restore(h, k, true); close_hold(h, k); h++ :: else -> break od
}

/* The host itself: its timer may fire at any moment after arming; after a boot it is the boot-restore unit. */
proctype DeadMan(byte h) {
  byte my_boot; byte k = 0;
end:
  do
  :: armed[h] && !locked[h] && !tried[h] ->
     restore(h, k, false);
     /* Tried and not proven: one shot, then a person or a recoverer; a boot tries once more. */
     tried[h] = degraded[h] && armed[h]
  od
}

/* Expiry before arming, a break by a person, a power cycle. */
proctype Environment(byte h) {
  bool had_power_cycle = false;
end:
  do
  :: atomic { holder[h] != 0 && !armed[h] && !debt[h] && !locked[h] -> holder[h] = 0 }
  :: atomic { holder[h] != 0 && faults_left > 0 -> faults_left--; epoch[h]++; holder[h] = 0 }
  :: atomic {
       !had_power_cycle && faults_left > 0 ->
       faults_left--; had_power_cycle = true; boots[h]++; locked[h] = false; tried[h] = false; restorers[h] = 0; acting[h] = 0;
       voided[h] = (holder[h] != 0);
       /* Production that was active but not enabled does not come back by itself. */
       if
       :: armed[h] -> prod[h] = DOWN
       :: true
       fi
#ifdef MUTANT_TRANSIENT_DEAD_MAN
       ; armed[h] = false
#endif
       ; INVARIANT(h)
     }
  od
}

/* Nothing can move any more: production is back, or it is in debt and a person sees it; no lease lasts for ever. */
active proctype Monitor() {
  byte h;
  atomic {
    h = 0;
    do :: h < NH -> prod[h] = UP; h++ :: else -> break od;
    h = 0;
    do :: h < NH -> run DeadMan(h); run Environment(h); h++ :: else -> break od;
    run Coordinator(1); run Recoverer(1);
#if COORDINATORS > 1
    run Coordinator(2)
#endif
  }
  timeout;
  h = 0;
  do
  :: h < NH ->
     INVARIANT(h);
     assert(prod[h] == UP || (debt[h] && degraded[h]));
     assert(debt[h] || !armed[h]);
     assert(holder[h] == 0 || (debt[h] && degraded[h]));
     assert(!locked[h] && restorers[h] == 0);
     h++
  :: else -> break
  od
}
